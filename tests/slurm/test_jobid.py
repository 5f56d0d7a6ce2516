import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.base.errors import JobIdError, UsageError
from transom_hpc.slurm.jobid import JobId, parse_job_id

READ = {
    "123": JobId(123),
    "123_4": JobId(123, (4,)),
    "123_[5-9%2]": JobId(123, (5, 6, 7, 8, 9), 2),
    "123_[0-20:5]": JobId(123, (0, 5, 10, 15, 20)),
    "123_[1,3-5]": JobId(123, (1, 3, 4, 5)),
    "123_[4%2]": JobId(123, (4,), 2),
    "123+1": JobId(123, component=1),
    "123+0.batch": JobId(123, component=0, step="batch"),
    "123.batch": JobId(123, step="batch"),
    "123.extern": JobId(123, step="extern"),
    "123.0": JobId(123, step="0"),
    "123.0+1": JobId(123, step="0+1"),
    "123_4.batch": JobId(123, (4,), step="batch"),
}

# Other ways to write the same.
ALSO = {
    " 123 ": "123",
    "123_[4]": "123_4",
    "123_[1-4:3,9%1]": "123_[1,4,9%1]",
    "123_[3,1,2]": "123_[1-3]",
    "123_[1,1,2]": "123_[1-2]",
    "0123": "123",
    "123_04": "123_4",
    "123.00": "123.0",
    # slurm.h since 20.11
    "123.4294967293": "123.TBD",
    "123.4294967292": "123.extern",
    "123.4294967291": "123.batch",
    "123.4294967290": "123.interactive",
    # and before
    "123.4294967294": "123.batch",
    "123.4294967295": "123.extern",
}

BAD = [
    "",
    "abc",
    "-1",
    "0",
    "123_",
    "123_x",
    "123_[",
    "123_[]",
    "123_[5-]",
    "123_[9-5]",
    "123_[0-20:0]",
    "123_[1-4000000000]",
    "123_[0-4000000,0-4000000]",
    "123_4+1",
    "123+",
    "123.",
    "123.foo",
    "123.4294967289",
    "123.99999999999",
    "99999999999",
    "123 456",
    "123_[4,22,25,28,31,34,37,40,43,4",
    "\N{ARABIC-INDIC DIGIT ONE}",
    "123\n4",
]


@pytest.mark.parametrize(("text", "job"), READ.items())
def test_read_and_written_again(text: str, job: JobId) -> None:
    assert parse_job_id(text) == job
    assert str(job) == text


@pytest.mark.parametrize(("text", "canonical"), ALSO.items())
def test_the_canonical_text(text: str, canonical: str) -> None:
    assert str(parse_job_id(text)) == canonical


@pytest.mark.parametrize("text", BAD)
def test_errors_name_the_text(text: str) -> None:
    with pytest.raises(JobIdError) as caught:
        parse_job_id(text)
    assert caught.value.text == text
    assert repr(text) in str(caught.value)
    assert isinstance(caught.value, UsageError)


def test_a_cut_expression_is_said_to_be_cut() -> None:
    with pytest.raises(JobIdError, match="SLURM_BITSTR_LEN=0"):
        parse_job_id("18_[4,22,25,28,31,34,37,40,43,4")


_tasks = st.sets(st.integers(0, 500), min_size=1, max_size=20).map(lambda tasks: tuple(sorted(tasks)))
_jobs = st.builds(
    JobId,
    job=st.integers(1, 2**32 - 1),
    tasks=_tasks,
    throttle=st.none() | st.integers(1, 99),
    step=st.none() | st.sampled_from(["0", "17", "batch", "extern", "interactive"]),
)


@given(_jobs)
def test_any_job_is_written_and_read_back(job: JobId) -> None:
    assert parse_job_id(str(job)) == job


@given(st.text("0123456789_[]-:%,.+ batch", max_size=25))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        job = parse_job_id(text)
    except JobIdError:
        return
    assert parse_job_id(str(job)) == job

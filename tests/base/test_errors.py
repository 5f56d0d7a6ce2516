import pickle

import pytest

from transom_hpc.base import errors


def _below(cls: type[errors.TransomError]) -> list[type[errors.TransomError]]:
    return [cls, *(found for below in cls.__subclasses__() for found in _below(below))]


@pytest.mark.parametrize("cls", _below(errors.TransomError), ids=lambda cls: cls.__name__)
def test_every_error_keeps_its_facts_through_pickle(cls: type[errors.TransomError]) -> None:
    error = cls("host n2 is lost", node="n2", step=400)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == "host n2 is lost"
    assert (again.node, again.step) == ("n2", 400)


def test_a_fact_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="SlurmRefused has no 'job'"):
        _ = errors.SlurmRefused("no", answer="no").job


def test_exit_codes_tell_what_the_caller_can_put_right() -> None:
    for cls in _below(errors.TransomError):
        assert cls.exit_code == (2 if issubclass(cls, errors.UsageError) else 1)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__
    for cls in (found for found in _below(errors.TransomError) if found.__module__ == errors.__name__):
        assert f" {cls.__name__} " in errors.__doc__ or f"    {cls.__name__}  " in errors.__doc__


def test_no_name_shadows_a_builtin() -> None:
    assert not {cls.__name__ for cls in _below(errors.TransomError)} & set(dir(__builtins__))

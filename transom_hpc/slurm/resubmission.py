"""What sbatch must be told so that another job is asked for as one was. Pure: what scontrol shows in, words out.

Options of the batch script come with the script. Those of sbatch's command line are known to the job only, so all that
scontrol shows is said again: the command line beats the script, and where both say the same it does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from transom_hpc.slurm.text import JobFacts

_NOTHING = frozenset({"", "(null)", "N/A", "None", "0"})
# scontrol's field, sbatch's option.
_SAME = (
    ("TimeLimit", "time"),
    ("Partition", "partition"),
    ("Account", "account"),
    ("QOS", "qos"),
    ("CPUs/Task", "cpus-per-task"),
    ("MinMemoryNode", "mem"),
    ("MinMemoryCPU", "mem-per-cpu"),
    ("MinTmpDiskNode", "tmp"),
    ("Features", "constraint"),
    ("Licenses", "licenses"),
    ("Reservation", "reservation"),
)
_GPUS = re.compile(r"gres[:/](gpu\S*)")


def options(job: JobFacts) -> list[str]:
    """sbatch's options for a job as this one, except those for nodes, tasks, comment and excluded hosts.

    Args:
        job: as the controller knows it while it runs.
    """
    found = [f"--{option}={job.words[name]}" for name, option in _SAME if job.words.get(name, "") not in _NOTHING]
    found += [f"--job-name={job.name}", "--no-kill", "--open-mode=append"]
    found += [] if job.requeue else ["--no-requeue"]
    found += ["--exclusive"] if job.words.get("OverSubscribe") == "NO" else []
    if job.words.get("TresPerNode", "") not in _NOTHING:
        found.append(f"--gres={re.sub(r'gres[:/]', '', job.words['TresPerNode'])}")
    for name, option in (
        ("TresPerJob", "gpus"),
        ("TresPerTask", "gpus-per-task"),
        ("TresPerSocket", "gpus-per-socket"),
    ):
        gpus = _GPUS.search(job.words.get(name, ""))
        if gpus:
            found.append(f"--{option}={re.sub(r'^gpu[:=/]?', '', gpus[1])}")
    if job.work_dir:
        found.append(f"--chdir={job.work_dir}")
    for path, option in ((job.std_out, "output"), (job.std_err if job.std_err != job.std_out else "", "error")):
        if path:
            found.append(f"--{option}={_pattern(path, job.job_id)}")
    return found


def arguments(command: str, program: Sequence[str], is_file: Callable[[str], bool]) -> list[str]:
    """The arguments that a batch script was submitted with.

    Args:
        command: as scontrol shows it: the script and its arguments, with blanks between them; a script alone; or "".
        program: the program and its arguments as they reached us; most scripts get just these, and from them it is
            known which blanks are inside an argument.
        is_file: whether there is such a file: the script's path may have blanks too.

    Returns:
        The arguments; those that are no part of the program are cut at blanks.
    """
    words = command.split(" ")
    script = next((n for n in range(1, len(words) + 1) if is_file(" ".join(words[:n]))), 1)
    rest = " ".join(words[script:])
    joined = " ".join(program)
    if program and rest == joined:
        return list(program)
    if program and rest.endswith(" " + joined):
        return [*rest.removesuffix(" " + joined).split(" "), *program]
    return rest.split(" ") if rest else []


def _pattern(path: str, job_id: int) -> str:
    """The path with sbatch's %j for the job's id in the file's name: each job writes into a file of its own.

    A folder stays as it is: it is there, and another may not be.
    """
    folder, slash, name = path.replace("%", "%%").rpartition("/")
    return folder + slash + re.sub(rf"(?<![0-9A-Za-z]){job_id}(?![0-9A-Za-z])", "%j", name)

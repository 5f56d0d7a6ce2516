"""The job's steps: starts them with srun on chosen hosts, and ends them within a deadline. It decides nothing."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol.events import EXIT_NOT_SHARED, EXIT_STOPPED
from transom_hpc.tol.exits import FirstExit, parse_exit
from transom_hpc.tol.job import Job

# Runs in every task around the program. The names are those of torch's env:// start and of torchrun (elastic/run).
# The first task that ends badly leaves its status in a file (O_EXCL: one wins): srun would tell the highest status of
# all, and that is the 137 of those that it killed because of the first. `exits.parse_exit` reads it. Beside the status
# stands where the kernel's count of processes killed for memory has grown meanwhile, and below what the program said
# of its end (`last_words`). Where the disk is full a symbolic link says it in short: its text needs no block.
# Rank 0 leaves a file when it begins and one when it has ended well: srun's 0 alone does not prove that anything ran
# (tried: 0 after "aborted before step completely launched").
# A trap, unlike an ignored signal, is not inherited by the program. A task that was asked to leave ends well for srun,
# which would else kill the slower ones; the last of them on a host gives the memory back, since it can't be reached
# any more when Slurm ends the job.
_TASK = f"""
killed_for_memory() {{  # sets group and host: how many so far in this control group, on this host
    local id kinds path file name count
    group=0 host=0
    while IFS=: read -r id kinds path; do
        case $kinds in
            '') file=/sys/fs/cgroup$path/memory.events;;
            memory|memory,*|*,memory|*,memory,*) file=/sys/fs/cgroup/memory$path/memory.oom_control;;
            *) continue;;
        esac
        [ -r "$file" ] || continue
        while read -r name count; do [ "$name" != oom_kill ] || group=$((group + count)); done < "$file"
    done < /proc/self/cgroup
    while read -r name count; do [ "$name" != oom_kill ] || host=$count; done < /proc/vmstat
}} 2>/dev/null
if [ ! -d "$TRANSOM_RUN_DIR/journal" ]; then
    echo "transom: host $SLURMD_NODENAME does not see the run directory $TRANSOM_RUN_DIR" >&2
    exit {EXIT_NOT_SHARED}
fi
mkdir -p -m 700 "$TRANSOM_SHM"
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
export TRANSOM_LAST_WORDS=$TRANSOM_SHM/died-$TRANSOM_ATTEMPT-$RANK
trap : TERM INT HUP USR1 USR2
[ "$RANK" -ne 0 ] || : > "$TRANSOM_BEGUN_FILE"
killed_for_memory
group_before=$group host_before=$host
"$@"
code=$?
if [ $code -ne 0 ]; then
    killed_for_memory
    oom=- words=
    [ "$host" -le "$host_before" ] || oom=host
    [ "$group" -le "$group_before" ] || oom=group
    [ ! -r "$TRANSOM_LAST_WORDS" ] || IFS= read -r words < "$TRANSOM_LAST_WORDS"
    short="$RANK $SLURMD_NODENAME $code $oom"
    (set -o noclobber; printf '%s\\n%s\\n' "$short" "$words" > "$TRANSOM_EXIT_FILE") 2>/dev/null
    [ -s "$TRANSOM_EXIT_FILE" ] || ln -s "$short
${{words%% *}} -" "$TRANSOM_EXIT_FILE.short" 2>/dev/null
elif [ "$RANK" -eq 0 ]; then
    : > "$TRANSOM_DONE_FILE"
fi
if [ $code -eq {EXIT_STOPPED} ]; then
    code=0
    : > "$TRANSOM_SHM/left-$LOCAL_RANK"
    set -- "$TRANSOM_SHM"/left-*
    [ $# -lt "$LOCAL_WORLD_SIZE" ] || rm -rf "$TRANSOM_SHM"
fi
exit $code
"""


class Step:
    """A running job step: its srun.

    Args:
        process: the srun process.
        log: whether its complaints go where this process's go.
    """

    def __init__(self, process: subprocess.Popen[str], log: bool = False) -> None:
        self.process = process
        self._log_from = _log_size() if log else None

    @property
    def output(self) -> IO[str] | None:
        """Standard output of its tasks, when it was asked for."""
        return self.process.stdout

    def poll(self) -> int | None:
        """Exit status of the step, None while it runs; 128 + signal when a signal ended it."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def words(self) -> list[str]:
        """What Slurm has said of the step so far, line by line, where the job's output goes to a file."""
        return [] if self._log_from is None else slurm_words(_log_since(self._log_from))

    def end(self, patience_s: float = 1.5) -> None:
        """End the step by force, within the given seconds and a little.

        srun answers SIGTERM by SIGKILL for its tasks on all hosts that it reaches; while a host of the step is dead it
        does not return by itself, so after the deadline it is killed.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Steps:
    """Starts the steps of one job.

    Args:
        job: the job.
        site: for srun's MPI type and extra arguments.
        environment: what the steps inherit.
    """

    def __init__(self, job: Job, site: SiteConfig, environment: Mapping[str, str]) -> None:
        self._job = job
        self._site = site
        # A step is described by its arguments alone: what the batch job's own options left here would change it.
        self._environment = {name: value for name, value in environment.items() if name not in _BATCH_ONLY}

    def program(
        self,
        argv: Sequence[str],
        hosts: Sequence[str],
        *,
        tasks_per_node: int,
        environment: Mapping[str, str],
        prefix: Path,
    ) -> Step:
        """Start the program: `tasks_per_node` ranks a host, in the order of `hosts`.

        Args:
            prefix: start of the names of this launch's files on the shared disk: PREFIX.begun is left by rank 0 when it
                begins, PREFIX.exit by the first task that ends badly, PREFIX.done by rank 0 that ended well.
        """
        hostfile = self._job.shm / f"{prefix.name}.hosts"  # srun reads it here; the shared disk may be full
        hostfile.write_text("".join(f"{host}\n" * tasks_per_node for host in hosts))
        master = {"MASTER_ADDR": _address(hosts[0]), "MASTER_PORT": str(_free_port())}
        cpus = self._environment.get("SLURM_CPUS_PER_TASK")  # srun reads it no more since 22.05
        arguments = [
            f"--nodes={len(hosts)}",
            f"--ntasks={len(hosts) * tasks_per_node}",
            "--distribution=arbitrary",
            "--kill-on-bad-exit=1",
            "--job-name=program",
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            *(["--label"] if len(hosts) * tasks_per_node > 1 else []),
            *self._site.srun,
        ]
        interface = self._site.interface
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
        network = dict.fromkeys(names, interface) if interface else {}
        return self._start(
            arguments,
            ["bash", "-c", _TASK, "transom-task", *argv],
            {
                **network,
                **master,
                "LOCAL_WORLD_SIZE": str(tasks_per_node),
                "SLURM_HOSTFILE": str(hostfile),
                **{f"TRANSOM_{name.upper()}_FILE": str(_beside(prefix, name)) for name in ("begun", "done", "exit")},
                **environment,
            },
        )

    def sidecar(self, argv: Sequence[str], hosts: Sequence[str], environment: Mapping[str, str], log: Path) -> Step:
        """Start the sidecar, one MPI rank a host. What it prints is read from the step; complaints go to a log."""
        # A rank that dies alone takes the step with it, and all are started again: its silence would blame its host.
        arguments = [*_one_each(hosts), "--kill-on-bad-exit=1", "--gres=none", "--cpu-bind=none", "--job-name=sidecar"]
        with log.open("ab") as complaints:
            return self._start(arguments, argv, environment, stdout=subprocess.PIPE, stderr=complaints)

    def server(self, argv: Sequence[str], hosts: Sequence[str], environment: Mapping[str, str], log: Path) -> Step:
        """Start the checkpoint server, one MPI rank a host; all it says goes to a log."""
        # One that dies takes the step with it, and all are started again: what they did they take up where it was.
        arguments = [*_one_each(hosts), "--kill-on-bad-exit=1", "--gres=none", "--cpu-bind=none", "--job-name=server"]
        interface = self._site.interface
        network = {"OMPI_MCA_btl_tcp_if_include": interface} if interface else {}
        with log.open("ab") as words:
            return self._start(arguments, argv, {**network, **environment}, stdout=words, stderr=words)

    def probe(self, hosts: Sequence[str], patience_s: float = 10.0) -> dict[str, str]:
        """Try a step on each host.

        Returns:
            The hosts on which it could not be started or did not end in time, with Slurm's words; none when that was
            so on all of them: then it is not the hosts.
        """
        deadline = time.monotonic() + patience_s
        steps = {
            host: self._start(
                [*_one_each([host]), "--gres=none", "--job-name=probe", "--mpi=none"],
                ["true"],
                {},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for host in hosts
        }
        lost: dict[str, str] = {}
        for host, step in steps.items():
            try:
                _, complaint = step.process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                lost[host] = f"no step could be started on {host} in {patience_s:.0f} s"
                step.end(0.5)
                continue
            if step.poll():
                words = complaint.strip().splitlines()
                lost[host] = f"no step can be started on {host}: {words[-1] if words else 'srun gave no reason'}"
        return lost if len(lost) < len(hosts) else {}

    def clean(self, hosts: Sequence[str], patience_s: float = 8.0) -> None:
        """Remove the job's folder in the shared memory of each host; hosts that don't answer in time are left."""
        arguments = [*_one_each(hosts), "--kill-on-bad-exit=0", "--gres=none", "--job-name=clean", "--mpi=none"]
        step = self._start(arguments, ["rm", "-rf", str(self._job.shm)], {}, stderr=subprocess.DEVNULL)
        try:
            step.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass
        step.end(1.0)

    def _start(
        self,
        arguments: Sequence[str],
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
    ) -> Step:
        mpi = [] if any(argument.startswith("--mpi=") for argument in arguments) else [f"--mpi={self._site.mpi}"]
        command = ["srun", "--overlap", "--no-kill", "--unbuffered", "--input=none", "--mem=0", *mpi, *arguments, *argv]
        process = subprocess.Popen(
            command,
            env={**self._environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
        )
        return Step(process, log=stderr is None)


def slurm_words(text: str) -> list[str]:
    """Slurm's own lines in the output of a step: what tasks print comes with their number in front, or without this."""
    return [match[1].strip() for match in _SLURM_LINE.finditer(text)]


def _log_size() -> int | None:
    """Bytes in the file that standard error goes to; None where it is none."""
    try:
        facts = os.fstat(2)
    except OSError:
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def _log_since(start: int) -> str:
    """The end of that file, from a byte on: 256 KiB of it at most."""
    try:
        with open("/proc/self/fd/2", "rb") as log:  # noqa: PTH123  (a file of its own, with an offset of its own)
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start, size - (1 << 18)))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def first_exit(prefix: Path) -> FirstExit | None:
    """What the first task that ended badly left; None when all ended well, or it was killed before it could."""
    try:
        text = _beside(prefix, "exit").read_text(errors="replace")
        # Where the disk was full the file is empty, and a symbolic link, which needs no block, tells the rest.
        return parse_exit(text or str(_beside(prefix, "exit.short").readlink()))
    except OSError:
        return None


def ended_well(prefix: Path) -> bool:
    """Whether rank 0 of the program has ended well, by its own word."""
    return _beside(prefix, "done").exists()


def has_begun(prefix: Path) -> bool:
    """Whether the program has begun: rank 0 says so before it starts the program, and each rank at a bad end."""
    return any(_beside(prefix, name).exists() for name in ("begun", "done", "exit"))


def _beside(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}")


_SLURM_LINE = re.compile(r"^(?:srun|slurmstepd): error: (.*)$", re.MULTILINE)
_BATCH_ONLY = frozenset(
    {
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
        "SLURM_NNODES",
        "SLURM_DISTRIBUTION",
        "SLURM_MEM_PER_NODE",
        "SLURM_MEM_PER_CPU",
        "SLURM_HOSTFILE",
    }
)


def _one_each(hosts: Sequence[str]) -> list[str]:
    return [f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"]


def _address(host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # a name that only Slurm knows; the first rank is on this host
        return socket.gethostname()
    return host


def _free_port() -> int:
    # The first rank runs on this host, so a port that is free here now is most likely free in a second.
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port

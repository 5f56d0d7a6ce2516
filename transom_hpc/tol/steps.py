"""The job's steps: starts them with srun on chosen hosts, and ends them within a deadline. It decides nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol.behind import parse_stand, who_is_behind
from transom_hpc.tol.complaints import Complaints
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
    local id kinds path file root name count
    group=0 host=0
    while IFS=: read -r id kinds path; do
        case $kinds in
            '') root=/sys/fs/cgroup file=memory.events;;
            memory|memory,*|*,memory|*,memory,*) root=/sys/fs/cgroup/memory file=memory.oom_control;;
            *) continue;;
        esac
        path=${{path%/}}
        while [ -n "$path" ] && [ ! -r "$root$path/$file" ]; do path=${{path%/*}}; done  # not counted, or a container
        [ -r "$root$path/$file" ] || continue
        while read -r name count; do [ "$name" != oom_kill ] || group=$((group + count)); done < "$root$path/$file"
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
        self._log = Complaints() if log else None

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
        return [] if self._log is None else self._log.lines()

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

    def probe(
        self, hosts: Sequence[str], patience_s: float = 10.0, *, argv: Sequence[str] = ("true",)
    ) -> dict[str, str]:
        """Try a step on each host.

        Args:
            hosts: the hosts.
            patience_s: for all of them together.
            argv: what the step does.

        Returns:
            The hosts on which it could not be started or did not end in time, with Slurm's words; none when that was
            so on all of them: then it is not the hosts.
        """
        deadline = time.monotonic() + patience_s
        steps = {
            host: self._start(
                [*_one_each([host]), "--gres=none", "--job-name=probe", "--mpi=none"],
                argv,
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

    def stacks(self, hosts: Sequence[str], attempt: str, folder: Path, patience_s: float = 8.0) -> str:
        """Have the stacks of every rank on these hosts written into a folder on the shared disk.

        Args:
            hosts: where to look; one that does not answer in time is left.
            attempt: the launch, as "A0001-L01".
            folder: made if missing, by the hosts: the files are HOST-rankN.txt.
            patience_s: for all of it.

        Returns:
            One sentence: which rank is behind, and where it stands.
        """
        until = time.monotonic() + patience_s
        argv = [
            sys.executable,
            "-P",
            "-m",
            "transom_hpc.tol.stacks",
            f"--attempt={attempt}",
            f"--shm={self._job.shm}",
            f"--folder={folder}",
            f"--patience={0.6 * patience_s:.1f}",  # the rest is for srun and the start of Python
        ]
        arguments = [*_one_each(hosts), "--kill-on-bad-exit=0", "--gres=none", "--cpu-bind=none", "--job-name=stacks"]
        with open(os.memfd_create("stacks"), "w+b") as said:  # noqa: PTH123  (it has no path)
            step = self._start([*arguments, "--mpi=none"], argv, {}, stdout=said, stderr=subprocess.DEVNULL)
            lines: list[str] = []
            unheard = set(hosts)
            while unheard:
                ended = step.poll() is not None
                lines = os.pread(said.fileno(), 1 << 24, 0).decode(errors="replace").splitlines()
                unheard -= {line.removeprefix("done ") for line in lines if line.startswith("done ")}
                if ended or time.monotonic() >= until - 0.5:
                    break
                time.sleep(0.05)
            step.end(0.4)
        return who_is_behind([stand for line in lines if (stand := parse_stand(line))], unheard)

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

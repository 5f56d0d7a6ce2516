"""The pipe to the process that keeps the readings. Never waits, never fails: what does not fit is dropped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from transom_hpc.monitors.reading import Reading, encode_reading

_FOREIGN = ("SLURM_", "PMIX_", "PMI_", "OMPI_", "TRANSOM_")  # it is no MPI rank, and no part of the program


class Recorder:
    """Starts the storing process and hands it readings.

    Args:
        path: the HDF5 file, see `store.new_store_path`.
        flush_s: seconds between writes to it.
    """

    def __init__(self, path: Path, flush_s: float) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        command = [sys.executable, "-m", "transom_hpc.monitors.store", str(path), str(flush_s)]
        self.dropped = 0
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
            start_new_session=True,  # mpirun kills the ranks' process groups a second after asking them to end
        )
        assert self._process.stdin is not None
        self._fd = self._process.stdin.fileno()
        os.set_blocking(self._fd, False)
        self._rest = b""

    def add(self, reading: Reading) -> None:
        """Hand over a reading, or drop it where the process does not keep up."""
        if self._push():
            self._rest = encode_reading(reading)
            self._push()
        else:
            self.dropped += 1

    def close(self, timeout_s: float) -> bool:
        """Let it write what it has.

        Args:
            timeout_s: how long to wait for that; after it the process is left to itself, and ends when it can.

        Returns:
            whether it has ended.
        """
        self._push()
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                pass
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _push(self) -> bool:
        while self._rest:
            try:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
            except BlockingIOError:
                return False
            except OSError:  # it is gone
                return False
        return True

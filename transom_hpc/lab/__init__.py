"""The embedded lab: a real Slurm of several hosts on one machine, whose hosts can be crashed, frozen and cut off."""

from transom_hpc.lab.ground import take_down
from transom_hpc.lab.lab import Lab
from transom_hpc.lab.status import HostStatus, LabStatus

__all__ = ["HostStatus", "Lab", "LabStatus", "take_down"]

"""The embedded lab: a real Slurm of several hosts on one machine, whose hosts can be crashed, frozen and cut off."""

from transom_hpc.lab.lab import HostStatus, Lab, LabStatus, take_down

__all__ = ["HostStatus", "Lab", "LabStatus", "take_down"]

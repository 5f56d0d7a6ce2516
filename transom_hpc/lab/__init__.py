"""The lab: a real Slurm of several hosts on one machine, to try things on."""

"""Fault-tolerant training and HPC runs on Slurm."""

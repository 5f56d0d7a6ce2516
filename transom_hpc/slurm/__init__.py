"""All that knows Slurm. It never decides what a run does next."""

"""TEE, eagle eye: watches every node of a job and names the one that is not well.

Usable without the rest of transom_hpc and without Slurm. It never ends a job and never talks to Slurm: it reports
verdicts, with evidence, to whoever started it.
"""

if not __name__.startswith("transom_hpc."):
    raise ImportError("import transom_hpc.monitors, not monitors: a second copy of every class would be made")

"""TCE, the checkpoint engine: memory first, written in the background, committed last.

Usable without the rest of transom_hpc and without Slurm. It never starts processes, talks to Slurm or decides
whether a run goes on.
"""

if not __name__.startswith("transom_hpc."):
    raise ImportError("import transom_hpc.ckpt, not ckpt: a second copy of every class would be made")

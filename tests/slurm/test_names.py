import subprocess
import sys

import transom_hpc.slurm


def test_all_is_what_is_there() -> None:
    public = {name for name, value in vars(transom_hpc.slurm).items() if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(transom_hpc.slurm, name), type(sys))}
    assert sorted(public - modules) == transom_hpc.slurm.__all__


def test_the_light_names_load_nothing_heavy() -> None:
    code = "import sys; from transom_hpc.slurm import expand_hosts, job_state, parse_job_id; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"torch", "numpy", "h5py", "mpi4py", "pandas", "rich", "submitit", "msgspec", "subprocess", "asyncio"}
    assert not heavy & set(loaded.stdout.split())

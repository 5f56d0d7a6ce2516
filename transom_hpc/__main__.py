"""`python -m transom_hpc` is `transom`."""

from transom_hpc.cli import main

main()

"""What `benchmarks/checkpoint.py` is made of: one file a part of the benchmark, or a thing that parts share."""

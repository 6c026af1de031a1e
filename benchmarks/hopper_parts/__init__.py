"""The parts of `benchmarks/hopper.py`, a module each (see `parts.py`)."""

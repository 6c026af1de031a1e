"""The parts of `benchmarks/portable.py`, a module each (see `parts.py`)."""

"""The parts of `benchmarks/hopper.py`: a module each, with `rows(rounds)`, which measures, and `table(rows)`, which says it."""

"""Other names of tests/harness.py."""

from tests.harness import SPECS, call, compile_text, emitted, run, shipped

__all__ = ["SPECS", "call", "compile_text", "emitted", "run", "shipped"]

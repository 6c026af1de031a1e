"""`benchmarks/library.py` from a made-up output of a test program."""

from __future__ import annotations

import importlib

import pytest

pytestmark = pytest.mark.usefixtures("benchmarks")

PRINTED = """\
ok     gpt2 rows and keys forward out                                 error 2.00e-03 of the largest, 4.00e-03 allowed
       gpt2 rows and keys forward: 3.50 us of the host a call
FAILED gpt2 few rows backward dq                                      error 1.00e-02 of the largest, 4.00e-03 allowed
       gpt2 few rows forward: 6.00 us of the host a call
34 checks, 1 failed
"""


def test_a_row_for_each_library() -> None:
    library = importlib.import_module("library")
    text = library.table([library.read("gpt2", 0.48, PRINTED)])
    assert "| gpt2 | 0.48 | 34 | 1 | 2.50 | 3.5 | 6.0 | - | - |" in text
    assert text.endswith("for a forward of one kernel. Forwards of several kernels take longer: 3.5 to 3.5 us here.")

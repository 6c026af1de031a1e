"""The kernel that appends to a cache: it compiles for GPUs, and moves 16 bytes at once."""

from __future__ import annotations

import pytest

from attngen.device.cuda.compiler import compile_with_lines
from attngen.emit.append import Append, append_program
from attngen.emit.manifest import from_manifest, to_manifest
from attngen.spec.dtypes import BF16, FP16, FP32

APPENDS = (
    Append(BF16, 128, 128),
    Append(FP16, 64, 32, True, 48, True, "first new row", FP16),
    Append(BF16, 128, 128, True, 64, False, "end", FP32),
    Append(FP32, 40, 40, False, 32, False, "new rows", FP32),
)


@pytest.mark.parametrize("append", APPENDS, ids=lambda append: append.name)
def test_rows_are_moved_by_16_bytes(append: Append) -> None:
    _, ptx = compile_with_lines(append_program(append, "sm_80"))
    stored = {line.split()[0] for line in ptx.splitlines() if line.startswith("\tst.global")}
    assert stored == {"st.global.u32", "st.global.v4.u32" if append.dtype.bytes == 2 else "st.global.v4.f32"}  # u32: of lengths


def test_a_manifest_has_all_of_it() -> None:
    program = append_program(APPENDS[2], "sm_80")
    assert from_manifest(to_manifest(program), program.text) == program

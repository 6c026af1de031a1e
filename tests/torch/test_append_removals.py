"""Every guard and bound of the kernel that appends to pages is needed, or known to have no effect."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

from attngen.device.emulated import EmulationError  # noqa: E402
from attngen.emit.append import Append, append_program  # noqa: E402
from attngen.torch import append as module  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.removals import CHOSEN, Emitted  # noqa: E402

FILE = "append_to_pages_bf16_128_rotary_128.cu"  # in generated/
PAGES, PAGE, HEADS, SIZE, ANGLES = 6, 4, 2, 128, 9
WITHOUT_EFFECT = {
    "part >= ROTATED: never true": "all of a row is rotated",
    "x != x: never true": "arithmetic of the emulated device gives a NaN whose upper 16 bits are a NaN",
}
Call = dict[str, Any]


def calls() -> list[Call]:
    """Sequences that begin before their first row, in the middle, and at the end of their last page, with entries of the table
    outside of the pool; rows of Q before position 0; positions after the last row of the tables."""
    torch.manual_seed(0)
    found = []
    for lengths, new_len, q_len in (([-2, 3, 7, 2], 3, 2), ([0, 5, 6, 20], 2, 5), ([1, 2, 3, 0], 1, 1), ([1, 2, 3, 0], 0, 2)):
        found.append({
            "q": randn(4, q_len, 2 * HEADS), "k": randn(4, new_len, HEADS), "v": randn(4, new_len, HEADS),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
            "page_table": torch.tensor([[0, 1], [2, 3], [PAGES, -1], [-1, 4]], dtype=torch.int32),
        })  # fmt: skip
    return found


def randn(*shape: int) -> Any:
    return torch.randn(*shape, SIZE).to(torch.bfloat16)


def expected(call: Call, caches: tuple[Any, Any], tables: tuple[Any, Any]) -> tuple[Any, ...]:
    """K_cache, V_cache, lengths and rotated Q after the call."""
    k_cache, v_cache = (cache.clone() for cache in caches)
    q, k = call["q"], call["k"]
    rotated = torch.empty_like(q)
    for b, length in enumerate(call["lengths"].tolist()):
        for row in range(k.shape[1]):
            position = length + row
            if position < 0 or position // PAGE >= call["page_table"].shape[1]:
                continue
            page = int(call["page_table"][b, position // PAGE])
            if 0 <= page < PAGES:
                k_cache[page, position % PAGE] = turned(k[b, row], position, tables)
                v_cache[page, position % PAGE] = call["v"][b, row]
        for row in range(q.shape[1]):
            rotated[b, row] = turned(q[b, row], length + k.shape[1] - q.shape[1] + row, tables)
    return k_cache, v_cache, call["lengths"] + k.shape[1], rotated


def turned(rows: Any, position: int, tables: tuple[Any, Any]) -> Any:
    cosines, sines = (table[min(max(position, 0), ANGLES - 1)] for table in tables)
    x, y = rows.float().chunk(2, -1)
    return torch.cat([x * cosines - y * sines, x * sines + y * cosines], -1).to(torch.bfloat16)


@pytest.mark.long
def test_every_guard_of_the_kernel_that_appends_is_needed() -> None:
    append = Append(module.DTYPES["bf16"], SIZE, SIZE, True, SIZE, False, "end", module.DTYPES["fp32"])
    source = append_program(append, "sm_80")
    emitted = Emitted(source.text)
    assert source.text == (ROOT / "generated" / FILE).read_text()
    angles = torch.rand(ANGLES, SIZE // 2)
    tables = angles.cos(), angles.sin()
    changed = replace(source, text=CHOSEN + emitted.removable())
    with patch.object(module, "append_program", lambda *_: changed):
        module._runtime.cache_clear()
        runtime = module._runtime(append, torch.device("cpu"))
    try:
        number = left_out(runtime)
        problems = [(call, caches(), tables) for call in calls()]
        assert finding(problems) == ""
        missed = [name for name in unnoticed(emitted, number, problems) if name not in WITHOUT_EFFECT]
    finally:
        module._runtime.cache_clear()
    assert missed == []


def caches() -> tuple[Any, Any]:
    return randn(PAGES, PAGE, HEADS), randn(PAGES, PAGE, HEADS)


def left_out(runtime: Any) -> Any:
    """The number of the removal in the library of the kernel."""
    library = runtime.compiled.kernel.library
    return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "attngen_left_out")


def finding(problems: list[tuple[Call, tuple[Any, Any], tuple[Any, Any]]]) -> str:
    for call, (k_cache, v_cache), tables in problems:
        wanted = expected(call, (k_cache, v_cache), tables)
        written = k_cache.clone(), v_cache.clone()
        turn = module.Turn(tables, False, "end")
        try:
            lengths, rotated = module.appended(
                call["q"], call["k"], call["v"], *written, call["lengths"], call["page_table"], turn
            )
        except EmulationError as error:
            return str(error.kind)
        if not all(torch.equal(one, other) for one, other in zip((*written, lengths, rotated), wanted, strict=True)):
            return "wrong result"
    return ""


def unnoticed(emitted: Emitted, number: Any, problems: Any) -> list[str]:
    found = []
    for i, removal in enumerate(emitted.removals):
        number.value = i
        if not finding(problems):
            found.append(removal.describe(emitted.text))
    number.value = -1
    return found

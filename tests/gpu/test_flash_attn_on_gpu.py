"""flash-attention's functions on the GPU: its grid of cases, forward and backward."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attngen.torch import flash_attn_func  # noqa: E402
from tests.torch.flash import check, grid, reference, results  # noqa: E402


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("case", "lengths", "heads", "size"), list(grid())[::3])
def test_cases(case, lengths, heads, size, deterministic) -> None:
    torch.manual_seed(0)
    (q_len, kv_len), (q_heads, kv_heads) = lengths, heads
    shapes = ((q_len, q_heads), (kv_len, kv_heads), (kv_len, kv_heads))
    tensors = tuple(torch.randn(2, n, h, size, device="cuda", dtype=torch.bfloat16) for n, h in shapes)
    named = case.named(q_heads, 2, "cuda")
    slopes = named.get("alibi_slopes")
    found = results(lambda *t: flash_attn_func(*t, **named, deterministic=deterministic), tensors)
    exact, usual = (
        results(lambda *t, p=p: reference(*t, case, slopes, p)[0], tensors, p) for p in (torch.float64, torch.bfloat16)
    )
    check(found, exact, usual)

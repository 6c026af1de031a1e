"""Gradients of captured tensors have no larger errors than twice those of torch's own operations in fp32."""

from __future__ import annotations

from itertools import product

import pytest

from tests import tiers
from tests.torch.gradient_errors import rows

CASES = product(["alibi", "dense_bias", "t5_relative_bias"], ["fp16", "bf16"])


@pytest.mark.parametrize(("name", "dtype"), tiers.cases(CASES, quick=[("t5_relative_bias", "bf16")]))
def test_fused_beside_math(name: str, dtype: str) -> None:
    assert not [row for row in rows(name, dtype, 1, "cpu", ["fused"]) if row[2] > row[4]]

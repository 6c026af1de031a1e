"""What a spec's `precision` lets a plan for elements of 16 bits do."""

from __future__ import annotations

from attngen.spec.attention import AttentionSpec


def rough_functions(spec: AttentionSpec) -> bool:
    """Whether functions of scores may be the GPU's own approximations: of results in 16 bits, but of no lse, which is fp32."""
    return spec.dtype.bytes == 2 and spec.precision == "high" and not spec.lse

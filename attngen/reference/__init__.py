"""The oracle: what a spec means, computed from the same expressions with numpy in float64, or with torch."""

from attngen.reference.numpy_oracle import Reference, numpy_attention

__all__ = ["Reference", "numpy_attention"]

"""The element types of tensors, one row each.

bf16 has no numpy type of its own. A bf16 numpy array is a structured array of the one-field type `NUMPY_BFLOAT16`, which
cannot be mistaken for integers. Arrays of `ml_dtypes.bfloat16` are accepted too, and their results have that type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported at the first use of an array: building a kernel uses none
    import numpy as np

    NUMPY_BFLOAT16: np.dtype[Any]


def __getattr__(name: str) -> Any:
    if name == "NUMPY_BFLOAT16":
        return BF16.numpy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: `name` is its name in the language, `cuda` in generated text, `torch` the attribute of torch."""

    name: str
    cuda: str
    torch: str
    bytes: int
    kind: str  # "float", "int" or "bool": the type of an expression that reads it

    @property
    def numpy(self) -> np.dtype[Any]:
        """The type of its numpy arrays."""
        return _numpy_dtype(self.torch)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name


FRACTION_BITS = {"fp16": 10, "bf16": 7, "fp32": 23}


def unit_roundoff(dtype: DType) -> float:
    """The largest relative error of rounding to a float type."""
    return float(2.0 ** -(FRACTION_BITS[dtype.name] + 1))


@cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    import numpy as np

    return np.dtype([("bfloat16", "<u2")]) if name == "bfloat16" else np.dtype(name)


FP32 = DType("fp32", "float", "float32", 4, "float")
FP16 = DType("fp16", "fp16", "float16", 2, "float")
BF16 = DType("bf16", "bf16", "bfloat16", 2, "float")
FP8_E4M3 = DType("fp8_e4m3", "fp8_e4m3", "float8_e4m3fn", 1, "float")
FP8_E5M2 = DType("fp8_e5m2", "fp8_e5m2", "float8_e5m2", 1, "float")
INT32 = DType("int32", "int", "int32", 4, "int")
INT64 = DType("int64", "long long", "int64", 8, "int")
BOOL = DType("bool", "bool", "bool", 1, "bool")

DTYPES: dict[str, DType] = {t.name: t for t in (FP32, FP16, BF16, INT32, INT64, BOOL)}
STORAGE_DTYPES: tuple[DType, ...] = (FP16, BF16, FP32)  # for Q, K, V and O
DTYPES_OF: dict[str, tuple[DType, ...]] = {  # for each tensor, if it has a type of its own
    **dict.fromkeys(("q", "k", "v"), (*STORAGE_DTYPES, FP8_E4M3, FP8_E5M2)),
    "o": STORAGE_DTYPES,
}


def round_to_storage(values: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """`values` (any real type) as a storage array of `dtype`, rounded to nearest, ties to even."""
    import numpy as np

    with np.errstate(over="ignore"):  # numbers beyond the largest become infinity
        if dtype is not BF16:
            return np.asarray(values, order="C").astype(dtype.numpy)
        bits = np.asarray(values, np.float32, order="C").view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet_nan, rounded).astype("<u2").view(BF16.numpy)


def from_storage(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values of a storage array: floats as float64, integers and booleans unchanged."""
    import numpy as np

    if array.dtype == BF16.numpy:
        bits = np.asarray(array, order="C").view("<u2").astype(np.uint32)
        return (bits << 16).view(np.float32).astype(np.float64)
    if array.dtype.name == "bfloat16":  # ml_dtypes
        return array.astype(np.float64)
    return array.astype(np.float64) if array.dtype.kind == "f" else array

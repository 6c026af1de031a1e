"""The element types of tensors, one row each.

bf16 has no numpy type of its own. A bf16 numpy array is a structured array of the one-field type `NUMPY_BFLOAT16`, which
cannot be taken for integers by accident; arrays of `ml_dtypes.bfloat16`, where that package is in use, are accepted too.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

NUMPY_BFLOAT16 = np.dtype([("bfloat16", "<u2")])


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: `name` is its name in the language, `cuda` in generated text, `torch` the attribute of torch."""

    name: str
    cuda: str
    torch: str
    bytes: int
    kind: str  # "float", "int" or "bool": the type of an expression that reads it
    numpy: np.dtype[Any]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name


FP32 = DType("fp32", "float", "float32", 4, "float", np.dtype(np.float32))
FP16 = DType("fp16", "fp16", "float16", 2, "float", np.dtype(np.float16))
BF16 = DType("bf16", "bf16", "bfloat16", 2, "float", NUMPY_BFLOAT16)
INT32 = DType("int32", "int", "int32", 4, "int", np.dtype(np.int32))
INT64 = DType("int64", "long long", "int64", 8, "int", np.dtype(np.int64))
BOOL = DType("bool", "bool", "bool", 1, "bool", np.dtype(np.bool_))

DTYPES: dict[str, DType] = {t.name: t for t in (FP32, FP16, BF16, INT32, INT64, BOOL)}
STORAGE_DTYPES: tuple[DType, ...] = (FP16, BF16, FP32)  # what Q, K, V and O may be stored as


def round_to_storage(values: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """`values` (any real type) as a storage array of `dtype`, rounded to nearest, ties to even."""
    if dtype is not BF16:
        return np.ascontiguousarray(values).astype(dtype.numpy)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet_nan, rounded).astype("<u2").view(NUMPY_BFLOAT16)


def from_storage(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A storage array as numpy values: floats as float64, integers and booleans as they are."""
    if array.dtype == NUMPY_BFLOAT16:
        bits = np.ascontiguousarray(array).view("<u2").astype(np.uint32)
        return (bits << 16).view(np.float32).astype(np.float64)
    if array.dtype.name == "bfloat16":  # ml_dtypes
        return array.astype(np.float64)
    return array.astype(np.float64) if array.dtype.kind == "f" else array

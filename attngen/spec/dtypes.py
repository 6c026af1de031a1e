"""The element types of tensors, one row each.

bf16 and fp8 have no numpy types of their own. A bf16 numpy array is a structured array of the one-field type `NUMPY_BFLOAT16`,
which cannot be mistaken for integers, and those of fp8 likewise (`DType.numpy`). Arrays of `ml_dtypes` are accepted too, and
their results have its types.

fp8 is that of the OCP 8-bit floating point specification: e4m3 has 4 bits of exponent (bias 7) and 3 of fraction, no infinity,
one NaN, and 448 as its largest number; e5m2 is the upper half of an fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported at the first use of an array: building a kernel uses none
    import numpy as np

    NUMPY_BFLOAT16: np.dtype


def __getattr__(name: str) -> object:
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
    fraction_bits: int = 0  # bits of the fraction of a float, without its leading one

    @property
    def numpy(self) -> np.dtype:
        """The type of its numpy arrays."""
        return _numpy_dtype(self.torch)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name


def unit_roundoff(dtype: DType) -> float:
    """The largest relative error of rounding to a float type."""
    return float(2.0 ** -(dtype.fraction_bits + 1))


@cache
def _numpy_dtype(name: str) -> np.dtype:
    import numpy as np

    bits = WITHOUT_NUMPY.get(name)
    return np.dtype(name) if bits is None else np.dtype([(name, bits)])


WITHOUT_NUMPY = {"bfloat16": "<u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}  # the types of the bits
FP32 = DType("fp32", "float", "float32", 4, "float", 23)
FP16 = DType("fp16", "fp16", "float16", 2, "float", 10)
BF16 = DType("bf16", "bf16", "bfloat16", 2, "float", 7)
FP8_E4M3 = DType("fp8_e4m3", "fp8_e4m3", "float8_e4m3fn", 1, "float", 3)
FP8_E5M2 = DType("fp8_e5m2", "fp8_e5m2", "float8_e5m2", 1, "float", 2)
INT32 = DType("int32", "int", "int32", 4, "int")
INT64 = DType("int64", "long long", "int64", 8, "int")
BOOL = DType("bool", "bool", "bool", 1, "bool")

INPUT_DTYPES: tuple[DType, ...] = (FP32, FP16, BF16, INT32, INT64, BOOL)  # for captured tensors
STORAGE_DTYPES: tuple[DType, ...] = (FP16, BF16, FP32)  # for Q, K, V and O
FP8_DTYPES: tuple[DType, ...] = (FP8_E4M3, FP8_E5M2)
DTYPES_OF: dict[str, tuple[DType, ...]] = {  # for each tensor, if it has a type of its own
    **dict.fromkeys(("q", "k", "v"), (*STORAGE_DTYPES, *FP8_DTYPES)),
    "o": STORAGE_DTYPES,
}
DTYPES: dict[str, DType] = {t.name: t for t in (*INPUT_DTYPES, *FP8_DTYPES)}


def round_to_storage(values: np.ndarray, dtype: DType) -> np.ndarray:
    """`values` (any real type) as a storage array of `dtype`, rounded to nearest, ties to even; numbers beyond the largest
    become infinity, or NaN where a type has none."""
    import numpy as np

    with np.errstate(over="ignore"):
        if dtype.torch not in WITHOUT_NUMPY:
            return np.asarray(values, order="C").astype(dtype.numpy)
        singles = np.asarray(values, np.float32, order="C")
    if dtype in FP8_DTYPES:
        return _to_fp8(singles, dtype).view(dtype.numpy)
    bits = singles.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, quiet_nan, rounded).astype("<u2").view(dtype.numpy)


def from_storage(array: np.ndarray) -> np.ndarray:
    """The values of a storage array: floats as float64, integers and booleans unchanged."""
    import numpy as np

    names = array.dtype.names
    if names is None or array.dtype.kind != "V":
        own = array.dtype.kind == "f" or array.dtype.name in WITHOUT_NUMPY  # ml_dtypes
        return array.astype(np.float64) if own else array
    bits = np.asarray(array, order="C").view(WITHOUT_NUMPY[names[0]])
    if names[0] == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    values: np.ndarray = _fp8_values(names[0])[bits]
    return values


def nans(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A storage array full of NaN, which in every type of floats a number of set bits is."""
    import numpy as np

    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 0xFF
    return array


@cache
def _fp8_values(name: str) -> np.ndarray:
    """The 256 values of an fp8 type, by their bits."""
    import numpy as np

    codes = np.arange(256, dtype=np.uint16)
    if name == "float8_e5m2":
        return (codes << 8).view(np.float16).astype(np.float64)
    exponents, fractions = codes >> 3 & 15, codes & 7
    values = np.where(exponents == 0, fractions / 8.0 * 2.0**-6, (1.0 + fractions / 8.0) * 2.0 ** (exponents - 7.0))
    return np.where(codes & 127 == 127, np.nan, np.where(codes > 127, -values, values))


def _finite(name: str) -> np.ndarray:
    """The finite values of an fp8 type that are not negative, in order."""
    import numpy as np

    values = _fp8_values(name)[:0x80]
    finite: np.ndarray = values[np.isfinite(values)]
    return finite


def within_range(values: np.ndarray, dtype: DType) -> np.ndarray:
    """`values`, those that an fp8 type cannot hold replaced by its largest number."""
    import numpy as np

    if dtype not in FP8_DTYPES:
        return values
    largest = _finite(dtype.torch)[-1]
    clipped: np.ndarray = np.clip(values, -largest, largest)
    return clipped


def _to_fp8(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The bits of fp32 values in an fp8 type."""
    import numpy as np

    finite = _finite(dtype.torch)
    beyond = 2.0 * finite[-1] - finite[-2]  # what would follow the largest number
    between = (np.append(finite[1:], beyond) + finite) / 2.0
    size = np.abs(values).astype(np.float64)
    below, above = (np.searchsorted(between, size, side) for side in ("left", "right"))  # they differ in the middle
    codes = np.where(below % 2 == 0, below, above)
    codes = np.where(np.isnan(values), 0x7F, np.minimum(codes, finite.size))
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)

"""What a function of a library returns: codes, in the order of their numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StatusCode:
    name: str
    text: str


STATUSES = (
    StatusCode("OK", "success"),
    StatusCode("SIZE", "a size or a length is negative, not stated, or larger than 2^29"),
    StatusCode("HEADS", "the number of query heads is no multiple of the number of key/value heads"),
    StatusCode("TOO_LARGE", "the call is too large for one launch: split it over batch or heads"),
    StatusCode("PARAM", "a param is out of range"),
    StatusCode(
        "OUT_OF_RANGE",
        "an expression of the attention would read outside an array, or divide by 0, with these sizes and params",
    ),
    StatusCode("NULL_POINTER", "an array with elements has no address"),
    StatusCode("ADDRESS", "an array's address is not aligned as the kernel's copies require, to 16 bytes or to its elements"),
    StatusCode("LAST_STRIDE", "the last dimension of an array must have stride 1"),
    StatusCode("STRIDE", "a stride is too large, negative, or no multiple of 16 bytes, which the kernel's copies require"),
    StatusCode("OVERLAP", "elements of an array that is written share memory"),
    StatusCode(
        "BROADCAST", "this gradient is computed for an array with one element for each pair, not for one that is broadcast"
    ),
    StatusCode("WORKSPACE", "the workspace is missing, too small, or not aligned to 256 bytes"),
    StatusCode("NO_KERNEL", "the library has no kernel for this device's compute capability"),
    StatusCode("NO_CONTEXT", "this thread has no current CUDA context: call cudaSetDevice or cuCtxSetCurrent first"),
    StatusCode("NO_DRIVER", "libcuda.so.1 cannot be loaded, or is older than CUDA 12"),
    StatusCode("DRIVER_REFUSED", "the CUDA driver refused the call; driver_error() has its code"),
    StatusCode("PAGES", "the stride of pages, or of padded keys, is no multiple of that of rows, or they have 2^31 rows"),
)

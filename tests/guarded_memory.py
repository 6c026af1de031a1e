"""Memory of a GPU for tests in which no access outside of a tensor can hide: every tensor lies at the edge of mapped memory.

An allocation of torch gets physical pages of its own, in the middle of a reserved range of addresses; the pages on both sides
are not mapped. The tensor ends at the end of its pages, or begins at their beginning. A kernel that reads or writes beyond that
edge stops with CUDA's "illegal memory access", and no later call of the process succeeds. The pages are full of NaN (bytes of
0xFF), so an element that is read before it is written shows in the result.

By the driver's virtual memory management (CUDA Driver API, "Virtual Memory Management").
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass, field
from typing import Any

EDGES = ("end", "begin")
GUARD = 1 << 28  # bytes of unmapped addresses on each side: distances of strides and tiles
NAN_BYTE = 0xFF

_installed: list[Any] = []  # what torch has the addresses of

_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Mapped:
    """One allocation: the reserved range [begin, begin + reserved), and `pages` mapped bytes in its middle."""

    begin: int
    reserved: int
    pages: int
    handle: Any


@dataclass(slots=True)
class GuardedMemory:
    """torch's memory on the current GPU. `edge`: the side of a tensor that lies at the edge of its pages, "end" or "begin".

    A tensor that ends there begins where its size says: 3 numbers of 4 bytes at a multiple of 4 bytes, whole rows of Q, K and V
    at one of 16. Many of torch's own kernels do not work on such tensors; copies to and from the GPU do.
    """

    edge: str
    allocated: int = 0  # allocations so far
    _live: dict[int, Mapped] = field(default_factory=dict)

    def install(self) -> None:
        """Makes torch allocate here, for the rest of the process, which must end by `leave`. Raises RuntimeError if torch has
        allocated memory of a GPU before."""
        import torch

        allocate, free = _Allocate(self._allocate), _Free(self._free)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (allocate, free)]
        allocator = torch._C._cuda_customAllocator(*addresses)
        torch._C._cuda_changeCurrentAllocator(allocator)
        _installed.append((allocate, free, allocator))

    def _allocate(self, size: int, device: int, stream: int | None) -> int:
        from cuda.bindings import driver

        if size == 0:
            return 0
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = _result(driver.cuMemGetAllocationGranularity(properties, least))
        pages = -(-size // granularity) * granularity
        reserved = pages + 2 * GUARD
        begin = int(_result(driver.cuMemAddressReserve(reserved, 0, 0, 0)))
        handle = _result(driver.cuMemCreate(pages, properties, 0))
        mapped = begin + GUARD
        _result(driver.cuMemMap(mapped, pages, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _result(driver.cuMemSetAccess(mapped, pages, [access], 1))
        _result(driver.cuMemsetD8Async(mapped, NAN_BYTE, pages, stream or 0))
        address = mapped if self.edge == "begin" else mapped + pages - size
        self._live[address] = Mapped(begin, reserved, pages, handle)
        self.allocated += 1
        return address

    def _free(self, address: int, size: int, device: int, stream: int | None) -> None:
        from cuda.bindings import driver

        if not address:
            return
        one = self._live.pop(address)
        _result(driver.cuCtxSynchronize())  # kernels that use it may still run, on any stream
        _result(driver.cuMemUnmap(one.begin + GUARD, one.pages))
        _result(driver.cuMemRelease(one.handle))
        _result(driver.cuMemAddressFree(one.begin, one.reserved))


def leave(code: int) -> None:
    """Ends the process at once: tensors that are left would be freed when Python can no longer run what frees them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _result(returned: tuple[Any, ...]) -> Any:
    status, *results = returned
    if status.value:
        raise RuntimeError(f"the driver refused: {status.name}")
    return results[0] if results else None

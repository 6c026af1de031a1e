"""Consecutive addresses of which only those in use take memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref

if sys.platform == "win32":
    RESERVE, COMMIT, RELEASE, NO_ACCESS, READ_WRITE = 0x2000, 0x1000, 0x8000, 1, 4  # names of winnt.h

    class AddressSpace:
        """`size` addresses from `base` on; those that `use` names have memory, which is 0. Raise OSError if there is none."""

        def __init__(self, size: int) -> None:
            self._kernel = ctypes.WinDLL("kernel32", use_last_error=True)
            self._kernel.VirtualAlloc.restype = ctypes.c_void_p
            self.base = self._allocate(0, size, RESERVE, NO_ACCESS)
            weakref.finalize(self, self._kernel.VirtualFree, ctypes.c_void_p(self.base), ctypes.c_size_t(0), RELEASE)

        def use(self, begin: int, size: int) -> None:
            self._allocate(begin, max(1, size), COMMIT, READ_WRITE)

        def _allocate(self, begin: int, size: int, how: int, access: int) -> int:
            found: int | None = self._kernel.VirtualAlloc(ctypes.c_void_p(begin), ctypes.c_size_t(size), how, access)
            if found is None:
                raise ctypes.WinError(ctypes.get_last_error())
            return found

else:
    NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which mmap does not name: nothing is set aside

    class AddressSpace:
        """`size` addresses from `base` on, whose memory is 0 and is taken when it is touched. Raises OSError if there is too
        little."""

        def __init__(self, size: int) -> None:
            self._mapped = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
            self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))

        def use(self, begin: int, size: int) -> None:
            """Nothing has to be done."""

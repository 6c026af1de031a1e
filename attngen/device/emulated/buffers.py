"""The named buffers that a launch may access: its tensors, and the parts of dynamic and static shared memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from attngen.device.protocol import Memory
from attngen.emit.program import KernelEntry

SHARED = "shared memory"  # names the parts that have no name


@dataclass(frozen=True, slots=True)
class NamedBuffer:
    """`tensor` is the number of a Memory of the launch, or -1; `offset` is into dynamic or static shared memory."""

    name: str
    tensor: int
    is_static: bool
    offset: int
    bytes: int

    @property
    def is_shared(self) -> bool:
        return self.tensor < 0

    @property
    def label(self) -> str:
        """The name as the generated code spells it."""
        planned = self.is_shared and not self.is_static and self.name != SHARED
        return f"{self.name}_smem" if planned else self.name


def buffers_of(entry: KernelEntry, memory: Sequence[Memory], library: Path) -> tuple[NamedBuffer, ...]:
    """The buffers that a launch of `entry` may access. The first one that contains an address names it."""
    tensors = [NamedBuffer(m.name, i, False, 0, m.bytes) for i, m in enumerate(memory)]
    dynamic = [NamedBuffer(b.name, -1, False, b.offset, b.bytes) for b in entry.shared_buffers]
    whole = [NamedBuffer(SHARED, -1, is_static, 0, 2**32) for is_static in (False, True)]
    return (*tensors, *dynamic, *static_arrays(library), *whole)


@lru_cache(maxsize=64)
def static_arrays(library: Path) -> tuple[NamedBuffer, ...]:
    """The `__shared__` arrays of a library with their names in the source; none if the machine has no readelf."""
    tool = shutil.which("readelf") or shutil.which("llvm-readelf")
    if tool is None:
        return ()
    done = subprocess.run([tool, "-sWC", str(library)], capture_output=True, text=True, check=False)
    sized = re.findall(r": (\w+) +(\d+) +TLS +\w+ +\w+ +\d+ (.+)$", done.stdout, re.MULTILINE)
    found = sorted({(int(at, 16), int(size), name.rpartition("::")[2]) for at, size, name in sized})
    return tuple(NamedBuffer(name, -1, True, at, size) for at, size, name in found)


def find(buffers: Sequence[NamedBuffer], is_static: bool, offset: int) -> NamedBuffer:
    """The shared buffer that contains `offset`."""
    return next(b for b in buffers if b.is_shared and b.is_static == is_static and b.offset <= offset < b.offset + b.bytes)

"""A kernel that is compiled on first use: plans that no call uses are not compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from attngen.device.protocol import Device, Kernel, Launch, Memory
from attngen.emit.program import Program


@dataclass(slots=True)
class DeferredKernel:
    """The kernel of `source`, which `device` compiles once, on first use. Methods raise what the compilation raises."""

    device: Device
    source: Program
    _compiled: Kernel | None = None
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def launch(self, launches: tuple[Launch, ...], memory: tuple[Memory, ...], stream: int | None = None) -> None:
        self.compiled.launch(launches, memory, stream)

    @property
    def compiled(self) -> Kernel:
        with self._lock:
            if self._compiled is None:
                self._compiled = self.device.compile(self.source)
            return self._compiled

    def __getattr__(self, name: str) -> object:
        """Attributes that only this device's kernels have."""
        return getattr(self.compiled, name)

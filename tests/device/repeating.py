"""An emulated device that repeats launches as a GPU does: with other addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attngen.device.emulated import EmulatedDevice
from attngen.device.protocol import Kernel, Launch, Memory
from attngen.device.tensor_map import MappedTensor
from attngen.emit.program import Program

STREAM = 7


@dataclass
class RepeatingKernel:
    """An emulated kernel that repeats launches as one on a GPU does: with the addresses of the tensors in `order`."""

    kernel: Kernel

    @property
    def source(self) -> Program:
        return self.kernel.source

    def launch(self, launches: tuple[Launch, ...], memory: tuple[Memory, ...], stream: int | None = None) -> None:
        self.kernel.launch(launches, memory, stream)

    def repeat(self, launches: tuple[Launch, ...], order: tuple[str, ...]) -> Callable[[Sequence[int], int], None]:
        def moved(parameter: Any, argument: Any, addresses: dict[str, int]) -> Any:
            if isinstance(argument, MappedTensor):
                return replace(argument, pointer=addresses[parameter.of])
            return ctypes.c_void_p(addresses[parameter.of]) if parameter.binding == "data" else argument

        def again(given: Sequence[int], stream: int) -> None:
            assert stream == STREAM
            addresses = dict(zip(order, given, strict=True))
            for one in launches:
                pairs = zip(one.entry.parameters, one.arguments, strict=True)
                arguments = tuple(moved(parameter, argument, addresses) for parameter, argument in pairs)
                self.kernel.launch((replace(one, arguments=arguments),), ())

        return again

    def make_current(self) -> None:
        """As a GPU's context."""


class RepeatingDevice(EmulatedDevice):
    def compile(self, source: Program) -> Any:
        return RepeatingKernel(super().compile(source))

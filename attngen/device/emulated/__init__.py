"""The emulated device: the same generated CUDA, compiled by the host's C++ compiler and run on the CPU."""

from attngen.device.emulated.device import Counters, EmulatedDevice, EmulatedKernel
from attngen.device.emulated.findings import EmulationError

__all__ = ["Counters", "EmulatedDevice", "EmulatedKernel", "EmulationError"]

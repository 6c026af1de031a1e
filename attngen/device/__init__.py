"""Where a `KernelSource` runs: `cuda` and `emulated`, behind the protocol of `attngen.device.protocol`."""

"""Where a `Program` runs: `cuda` and `emulated`, behind the protocol of `attngen.device.protocol`."""

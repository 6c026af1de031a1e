"""(spec, plan) -> `KernelSource`: CUDA text and everything needed to launch it."""

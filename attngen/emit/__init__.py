"""(spec, plan) -> `Program`: CUDA text and everything needed to launch it."""

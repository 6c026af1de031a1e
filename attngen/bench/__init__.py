"""Measuring: attngen's kernels beside what a user would pick instead, on a GPU; exact counts on the emulated device."""

"""Measurements of attngen's kernels beside their alternatives on a GPU; exact counts on the emulated device."""

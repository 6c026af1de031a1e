"""The report: one self-contained page about one kernel, from its spec to its machine code."""

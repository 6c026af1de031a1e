"""The finer ladder: lesson kernels of a spec, one idea each, between one thread a row and the schedules for Hopper."""

"""`attngen package`: the kernels of specs as a library of C and C++17 that needs no Python, from their `Program`s."""

"""Facts: what follows from a spec alone. Each is a pure function of the spec that is computed once and then remembered.

One plan asks for the same fact dozens of times, for each candidate tile, and each new length of a call would ask again.
"""

from functools import lru_cache

REMEMBERED = 256  # results of each fact; the least recently used are dropped

fact = lru_cache(maxsize=REMEMBERED)

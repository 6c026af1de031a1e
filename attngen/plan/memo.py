"""`remembered`: results of a pure function are kept, since planning and each call ask for them again."""

from functools import lru_cache

REMEMBERED = 256  # results of each function; the least recently used are dropped

remembered = lru_cache(maxsize=REMEMBERED)

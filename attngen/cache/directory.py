"""The directory of compiled kernels on disk."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def cache_directory(kind: str) -> Path:
    """The directory for one kind of entry, such as "cuda" or "emulated"; `ATTNGEN_CACHE_DIR` overrides its root."""
    root = os.environ.get("ATTNGEN_CACHE_DIR")
    return (Path(root) if root else _of_user()) / kind


@cache
def _of_user() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("attngen")

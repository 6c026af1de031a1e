"""Packages that parts of attngen require, and that attngen does not install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def required(package: str, by: str, install: str) -> Iterator[None]:
    """A context that imports `package` for `by`, a module of attngen. Raises ModuleNotFoundError, an ImportError, that says
    what to install, if the package is missing; other errors of an import, as of one that is broken, pass."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(f"{by} requires {package}: pip install {install}", name=package) from None

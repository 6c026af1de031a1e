"""A second process of a check, so that two kernels run at a time.

The emulated device handles the signals of its process while a kernel runs, so a process runs one kernel at a time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class OtherProcess(Generic[A, R]):
    """A copy of this process, as it is now, that calls `function` for this one."""

    def __init__(self, function: Callable[[A], R]) -> None:
        self._connection, theirs = Pipe()
        self._id = os.fork()
        if self._id == 0:
            self._connection.close()  # so that the end of the first process is seen
            _serve(theirs, function)
        theirs.close()

    def call(self, argument: A) -> R | None:
        """The result of `function`, computed by the other process; None if it raises an exception, or if the process ends."""
        try:
            self._connection.send(argument)
            found: R | None = self._connection.recv()
        except (EOFError, OSError):
            return None
        return found

    def end(self) -> None:
        self._connection.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._id, signal.SIGKILL)
            os.waitpid(self._id, 0)


def can_fork() -> bool:
    """Whether a copy of this process would be of use, and works: it has one thread, and no library of macOS works in it."""
    forks = hasattr(os, "fork") and sys.platform != "darwin"
    return forks and (os.cpu_count() or 1) > 1 and threading.active_count() == 1


def _serve(connection: Connection, function: Callable[[A], R]) -> None:
    try:
        while True:
            argument = connection.recv()
            try:
                found = function(argument)
            except Exception:  # the first process calls the function again, and has the exception
                found = None
            connection.send(found)
    finally:  # without what the first process does when it ends; an interrupt is for both
        os._exit(0)

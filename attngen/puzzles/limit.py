"""A limit of the time that a kernel may run on the emulated device."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK = 0.2  # seconds between two looks at the clock


class TimeLimitError(Exception):
    """The time is over; the text is the emulated device's, with the place at which the kernel was."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeLimitError when this process has used so many seconds of the CPU, which do not depend on what else the machine
    does. The emulated device stops at SIGINT only, which the main thread alone gets: elsewhere there is no limit. What a
    shell has started in the background ignores SIGINT; here it does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over, ended = threading.Event(), threading.Event()
    end = time.process_time() + seconds

    def watch() -> None:
        while not ended.wait(TICK):
            if time.process_time() > end:
                over.set()
                _interrupt_main_thread()
                return

    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt as error:
        if over.is_set():
            raise TimeLimitError(*error.args) from None
        raise
    finally:
        ended.set()
        watcher.join()
        if not callable(before):
            signal.signal(signal.SIGINT, before)


def _interrupt_main_thread() -> None:
    """As Ctrl-C does: it interrupts what the thread waits for; on Windows, where handlers run in any thread, a kernel."""
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGINT)
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

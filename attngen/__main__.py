"""The command `attngen`, and `python -m attngen`."""

import atexit
import gc

OBJECTS = 200_000  # more than the modules of a command have


def run() -> None:
    """The command line of a process of its own. Modules live as long as the process, so the garbage collector visits their
    objects neither while they are imported nor at the end: that took a tenth of the time of `check` and `build`."""
    gc.set_threshold(OBJECTS)
    atexit.register(gc.freeze)
    from attngen.cli import main

    main(prog_name="attngen")


if __name__ == "__main__":
    run()

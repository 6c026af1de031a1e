"""`python -m attngen` is the command line."""

from attngen.cli import main

main(prog_name="attngen")

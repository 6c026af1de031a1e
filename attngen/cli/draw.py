"""`draw`: pictures of kernels and puzzles, as SVG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.cli import options
from attngen.cli.common import check_writable, write_whole
from attngen.cli.specs import arch_named, known_params, load_one_spec, source_of

if TYPE_CHECKING:
    from attngen.drawings.picture import Picture

LENGTH = 1024
PROCESSORS = 8
WHOSE = "Of a puzzle: your file.  [default: NAME.cu in the current folder; without one, the solution]"
OF_SPECS = ("kernel", "arch", "q_len", "kv_len", "given", "multiprocessors")


@click.command("draw")
@click.argument("subject", metavar="SPEC|PUZZLE", required=False)
@click.argument("what", required=False)
@options.file("-o", "--output", what="The file to write; - prints it.  [default: SUBJECT_WHAT.svg]")
@click.option("--list", "as_list", is_flag=True, help="List what there is to draw.")
@options.kernel
@options.arch
@options.size("--q-len", 1, "Number of queries.", LENGTH)
@options.kv_len
@options.param
@options.number("--multiprocessors", 1, "For blocks: how many multiprocessors.", PROCESSORS, 64)
@click.option("--source", type=click.Path(exists=True, dir_okay=False, path_type=Path), help=WHOSE)
@click.option(
    "--theme",
    type=click.Choice(["auto", "light", "dark"]),
    default="auto",
    show_default=True,
    help="Colours; auto follows the reader's preference, inside the file.",
)
def command(
    subject: str | None, what: str | None, output: Path | None, as_list: bool, kernel: str | None, arch: str | None, q_len: int,
    kv_len: int | None, given: tuple[str, ...], multiprocessors: int, source: Path | None, theme: str,
) -> None:  # fmt: skip
    """Draw what a kernel does, as an SVG file that is legible in light and dark.

    \b
    attngen draw --list                                      what there is to draw
    attngen draw mistral_window tiles --param size=200       which tiles the mask leaves, in which order
    attngen draw gpt2 bytes                                  naive, tiled, fused: how reuse removes traffic
    attngen draw gpt2 blocks --q-len 4096                    who waits at the end of a causal mask
    attngen draw gpt2 swizzle --kernel hopper                rows in banks, before and after
    attngen draw gpt2 fragment --kernel fused                which lane holds which element
    attngen draw gpt2 timeline --kernel hopper               copies, products and softmax that overlap
    attngen draw gpt2 barriers --kernel hopper               phases of mbarriers
    attngen draw 6 swizzle                                   your 06_transposition.cu: bank conflicts of each access

    PUZZLE is a number or a name of `attngen puzzle list`. What a picture shows is computed from the plan, or recorded in a run
    on the emulated device, and needs no GPU: change the tile, the lengths or your file, and draw again.
    """
    from attngen.drawings.catalogue import DRAWINGS

    if as_list:
        width = max(map(len, DRAWINGS))
        for drawing, words in DRAWINGS.items():
            click.echo(f"{drawing:<{width}}  {words}")
        return
    if subject is None or what is None:
        raise click.UsageError("name what to draw, as in `attngen draw gpt2 tiles`; `attngen draw --list` lists the drawings")
    if what not in DRAWINGS:
        raise click.BadParameter(f"there is no drawing {what!r}; there are {', '.join(DRAWINGS)}", param_hint="WHAT")
    path = output or Path(f"{Path(subject).stem}_{what}.svg")
    if str(path) != "-":
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)  # before anything is run
    if _is_puzzle(subject):
        options.refuse("a puzzle has no such choices", *OF_SPECS)
        picture = _of_puzzle(subject, what, source)
    else:
        options.refuse("a spec is drawn as it is planned", "source")
        picture = _of_spec(subject, what, (kernel, arch, q_len, kv_len, given), multiprocessors)
    text = picture.svg(theme)  # type: ignore[arg-type]
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    write_whole(path, text.encode())
    click.echo(f"{path}  {picture.title}")


def _is_puzzle(subject: str) -> bool:
    from attngen.puzzles.folder import folders

    key = Path(subject).name.removesuffix(".cu")
    return key.isdigit() or any(key in (folder.name, folder.name[3:]) for folder in folders())


def _of_spec(
    subject: str,
    what: str,
    chosen: tuple[str | None, str | None, int, int | None, tuple[str, ...]],
    processors: int,
) -> Picture:
    from attngen.inspect.call import Call
    from attngen.inspect.drawn import drawn_spec
    from attngen.inspect.prepare import check_call
    from attngen.inspect.work import check_countable
    from attngen.reference.problems import Shape

    kernel, arch, q_len, kv_len, given = chosen
    loaded = load_one_spec(subject)
    plan, _ = source_of(loaded, arch_named(arch, kernel, [loaded]), kernel)
    params = known_params(loaded.spec, given)
    call = Call(loaded.spec, plan, q_len, kv_len or q_len, params)
    check_call(loaded.spec, Shape(1, q_len=call.q_len, kv_len=call.kv_len), params)
    check_countable(plan, call.problem)
    return drawn_spec(what, call, processors)


def _of_puzzle(subject: str, what: str, source: Path | None) -> Picture:
    from attngen.puzzles.drawn import drawn_puzzle
    from attngen.puzzles.folder import find_folder
    from attngen.puzzles.running import printed_to_stderr

    folder = find_folder(subject)
    own = Path(subject) if subject.endswith(".cu") else Path(f"{folder.name}.cu")
    path = source or (own if own.exists() else None)
    text, whose = (folder.solution, "the solution") if path is None else (path.read_text("utf-8-sig"), path.name)
    with printed_to_stderr():
        return drawn_puzzle(what, folder, text, whose)

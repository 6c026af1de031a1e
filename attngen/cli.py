"""The command line. Every command imports what it needs when it runs, so that `build` answers at once."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from attngen.language import Loaded
    from attngen.plan.arch import Arch

OK, FAILED, USAGE, DEVICE = 0, 1, 2, 3
EPILOG = "Exit codes: 0 done; 1 a check failed; 2 a mistake in the spec or the command; 3 the device cannot do it."
RUNG_CHOICE = click.Choice(["auto", "naive", "tiled", "fused"])


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="attngen")
def main() -> None:
    """attngen: say which attention you mean, get readable CUDA specialized to it.

    \b
    attngen build specs/gpt2.attn -o out     write CUDA and a manifest
    attngen check specs/gpt2.attn            run every rung against the oracle
    attngen explain specs/gpt2.attn          the plan, with its reasons
    attngen doctor                           what this machine has

    SPEC is an .attn file, or the name of a shipped one, as in `attngen check alibi`.
    """


@contextmanager
def reported() -> Iterator[None]:
    """Mistakes as diagnostics, device problems as a line, our own errors as a request to report them."""
    from attngen.diagnostics import DiagnosticError

    try:
        yield
    except DiagnosticError as error:
        click.echo(error.render(color=_color(sys.stderr)), err=True, nl=False)
        sys.exit(USAGE)
    except BrokenPipeError:  # `| head` has read enough; click knows what to do
        raise
    except OSError as error:
        click.echo(f"error: {error.strerror or error}: {error.filename or ''}", err=True)
        sys.exit(USAGE)
    except click.ClickException:
        raise
    except Exception as error:
        _classified(error)


def _classified(error: Exception) -> None:
    from attngen.device.arrays import ArgumentError
    from attngen.device.protocol import DeviceError
    from attngen.spec.obligations import ObligationError

    if isinstance(error, (ArgumentError, ObligationError, DeviceError)):
        click.echo(f"error: {error}", err=True)
        sys.exit(DEVICE if isinstance(error, DeviceError) else USAGE)
    _internal(error)


def _internal(error: Exception) -> None:
    if os.environ.get("ATTNGEN_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    click.echo(
        f"internal error: {type(error).__name__}: {error}\nThis is a bug of attngen: please report it with the spec. "
        "ATTNGEN_DEBUG=1 shows where.",
        err=True,
    )
    sys.exit(70)


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        with reported():
            return command(*args, **kwargs)

    return run


def _color(stream: Any) -> bool:
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")


def _load(spec: str, name: str | None) -> list[Loaded]:
    """The attentions of SPEC, or the one called `name`."""
    from attngen.language.load import load_path
    from attngen.shipped import find_spec

    loaded = list(load_path(find_spec(spec)))
    if name is None:
        return loaded
    chosen = [one for one in loaded if one.spec.name == name]
    if not chosen:
        raise click.BadParameter(f"{spec} has no attention {name}; it has {', '.join(o.spec.name for o in loaded)}")
    return chosen


def _arches(names: str) -> list[Arch]:
    from attngen.plan.arch import ARCHES, find_arch

    found = []
    for name in names.split(","):
        arch = find_arch(name.strip())
        if arch is None:
            raise click.BadParameter(f"no architecture is called {name}; there are {', '.join(ARCHES)}", param_hint="--arch")
        found.append(arch)
    return found


def _source(one: Loaded, arch: Arch, kernel: str | None) -> Any:
    """(plan, KernelSource) of one attention; refusals of the planner point at the spec's text."""
    from attngen.diagnostics import DiagnosticError
    from attngen.emit.emitter import emit
    from attngen.plan import choose

    try:
        plan = choose(one.spec, arch, kernel)
    except DiagnosticError as error:
        raise error.located(one.spans) from None
    return plan, emit(one.spec, plan)


def _rungs(kernel: str | None) -> tuple[str, ...]:
    return ("naive", "tiled", "fused") if kernel is None else (kernel,)


spec_argument = click.argument("spec")
name_option = click.option("--name", help="Only the attention of this name, where the file holds several.")
arch_option = click.option(
    "--arch", default="sm_80", show_default=True, help="Architectures, separated by commas; `attngen list` names them."
)


@main.command(epilog=EPILOG)
@spec_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where to write; here by default.",
)
@click.option("--kernel", type=RUNG_CHOICE, help="One rung; all three by default.")
@arch_option
@name_option
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@guarded
def build(spec: str, output: Path, kernel: str | None, arch: str, name: str | None, as_json: bool) -> None:
    """Write CUDA, and a JSON manifest that says how to launch it.

    \b
    attngen build specs/gpt2.attn                      naive, tiled and fused, for sm_80
    attngen build gpt2 --kernel fused --arch sm_90 -o out

    Needs no GPU and no CUDA. The same spec gives the same bytes every time.
    """
    from attngen.emit.manifest import to_manifest

    arches = _arches(arch)
    sources = [
        (target, _source(one, target, rung)[1]) for one in _load(spec, name) for rung in _rungs(kernel) for target in arches
    ]
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for target, source in sources:
        stem = source.name if len(arches) == 1 else f"{source.name}_{target.name}"
        for suffix, text in ((".cu", source.text), (".json", to_manifest(source))):
            _write(output / f"{stem}{suffix}", text)
            written.append(str(output / f"{stem}{suffix}"))
    click.echo(json.dumps({"written": written}) if as_json else "\n".join(written))


def _write(path: Path, text: str) -> None:
    """All of it, or nothing: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _params(given: tuple[str, ...]) -> dict[str, int | float]:
    values: dict[str, int | float] = {}
    for text in given:
        key, _, value = text.partition("=")
        try:
            values[key] = float(value) if any(c in value for c in ".einf") else int(value)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not NAME=NUMBER", param_hint="--param") from None
    return values


@main.command(epilog=EPILOG)
@spec_argument
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:N, emulated or auto (cuda where there is a GPU).")
@click.option("--kernel", type=RUNG_CHOICE, help="One rung; all three by default.")
@click.option("--dtype", type=click.Choice(["fp16", "bf16", "fp32"]), help="Instead of the spec's own.")
@click.option("--batch", type=click.IntRange(0), default=1, show_default=True)
@click.option(
    "--heads",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Query heads, where the spec leaves them open.",
)
@click.option("--kv-heads", type=click.IntRange(1), help="Key/value heads; as many as query heads by default.")
@click.option("--q-len", type=click.IntRange(0), default=200, show_default=True)
@click.option("--kv-len", type=click.IntRange(0), help="As q-len by default.")
@click.option("--param", "given", multiple=True, metavar="NAME=NUMBER", help="A param's value; its default otherwise.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random arrays.")
@click.option(
    "--thread-orders",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Emulated: orders in which threads run.",
)
@click.option("--fast", is_flag=True, help="Emulated: do not watch memory accesses.")
@name_option
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@guarded
def check(
    spec: str, device: str, kernel: str | None, dtype: str | None, batch: int, heads: int, kv_heads: int | None, q_len: int,
    kv_len: int | None, given: tuple[str, ...], seed: int, thread_orders: int, fast: bool, name: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Run every rung against the oracle (numpy in float64) and print the errors.

    \b
    attngen check specs/gpt2.attn
    attngen check alibi --q-len 300 --heads 4
    attngen check specs/gpt2.attn --device emulated --thread-orders 3

    The bound is twice the error of the same computation in torch's way (fp32 arithmetic, output rounded to the spec's type)
    plus one unit in the last place. On the emulated device every memory access is watched too.
    """
    from dataclasses import replace

    from attngen.inspect.checking import check_spec
    from attngen.reference.problems import Shape
    from attngen.spec.dtypes import DTYPES

    devices = _devices(device, thread_orders, fast)
    shape = Shape(batch, heads, kv_heads or heads, q_len, q_len if kv_len is None else kv_len)
    results = []
    table = None if as_json else _CheckTable()
    for one in _load(spec, name):
        wanted = one.spec if dtype is None else replace(one.spec, dtype=DTYPES[dtype])
        for result in check_spec(wanted, _rungs(kernel), devices, shape, _params(given), seed):
            results.append(result)
            if table is not None:
                table.add(result)
    if table is None:
        click.echo(json.dumps([_check_json(r) for r in results], indent=2))
    sys.exit(OK if all(r.comparison.passed for r in results) else FAILED)


def _devices(device: str, thread_orders: int, fast: bool) -> tuple[Any, ...]:
    from attngen.device.choose import device_by_name, has_gpu

    if device == "auto":
        device = "cuda" if has_gpu() else "emulated"
    if device == "emulated":
        from attngen.device.emulated import EmulatedDevice

        return tuple(EmulatedDevice(checked=not fast, seed=order) for order in range(thread_orders))
    try:
        return (device_by_name(device),)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from None


class _CheckTable:
    """Results as they come, a line each: long checks show their progress."""

    def __init__(self) -> None:
        click.echo(
            f"{'attention':<20} {'kernel':<20} {'device':<10} {'error':>9} {'allowed':>9} {'lse':>9} {'compile':>8} {'run':>8}"
        )

    def add(self, r: Any) -> None:
        c = r.comparison
        lse = "-" if c.lse_error is None else f"{c.lse_error:.2e}"
        verdict = click.style("ok", fg="green") if c.passed else click.style("FAILED", fg="red", bold=True)
        click.echo(
            f"{r.spec:<20} {r.rung + (' ' + r.schedule if r.schedule != r.rung else ''):<20} {r.device:<10} {c.error:>9.2e} "
            f"{c.allowed:>9.2e} {lse:>9} {r.compile_seconds:>7.2f}s {r.run_seconds:>7.2f}s  {verdict}",
            color=_color(sys.stdout),
        )


def _check_json(r: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(r) | {"passed": r.comparison.passed}


@main.command(epilog=EPILOG)
@spec_argument
@click.option("--stage", type=click.Choice(["tree", "spec", "plan", "cuda", "ptx", "sass"]), default="cuda", show_default=True)
@click.option("--kernel", type=RUNG_CHOICE, default="auto", show_default=True)
@arch_option
@name_option
@guarded
def show(spec: str, stage: str, kernel: str, arch: str, name: str | None) -> None:
    """Print one stage of the road from text to machine code.

    \b
    tree  the syntax tree          spec  what is meant       plan  how it is computed
    cuda  the generated file       ptx   NVRTC's output      sass  the machine code
    """
    (target, *_) = _arches(arch)
    if stage == "tree":
        from attngen.inspect.explain import describe_tree
        from attngen.language.syntax import parse
        from attngen.shipped import find_spec
        from attngen.source import SourceFile

        path = find_spec(spec)
        click.echo(describe_tree(parse(SourceFile(str(path), path.read_text()))), nl=False)
        return
    for one in _load(spec, name):
        click.echo(_stage(one, stage, kernel, target), nl=False)


def _stage(one: Loaded, stage: str, kernel: str, target: Arch) -> str:
    from attngen.inspect.explain import describe_spec, explain_plan

    if stage == "spec":
        return describe_spec(one.spec)
    plan, source = _source(one, target, kernel)
    if stage == "plan":
        return explain_plan(one.spec, plan)
    if stage == "cuda":
        return _highlighted(source.text)
    from attngen.device.cuda.compiler import compile_text, disassemble

    if stage == "ptx":
        return compile_text(source, "ptx").code.decode().rstrip("\0")
    return disassemble(compile_text(source).code)


def _highlighted(text: str) -> str:
    if not _color(sys.stdout):
        return text
    from pygments import highlight
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import CudaLexer

    return str(highlight(text, CudaLexer(), TerminalFormatter()))


@main.command(epilog=EPILOG)
@spec_argument
@click.option("--kernel", type=RUNG_CHOICE, default="auto", show_default=True)
@arch_option
@click.option("--q-len", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--kv-len", type=click.IntRange(1), help="As q-len by default.")
@click.option("--param", "given", multiple=True, metavar="NAME=NUMBER", help="A param's value; its default otherwise.")
@name_option
@guarded
def explain(
    spec: str, kernel: str, arch: str, q_len: int, kv_len: int | None, given: tuple[str, ...], name: str | None
) -> None:
    """Say why: every decision with its reason, the memory map, and the tiles that are visited."""
    from attngen.inspect.explain import explain_plan, explain_tiles

    (target, *_) = _arches(arch)
    for one in _load(spec, name):
        plan, _ = _source(one, target, kernel)
        click.echo(explain_plan(one.spec, plan))
        click.echo(explain_tiles(one.spec, plan, q_len, q_len if kv_len is None else kv_len, _params(given)))


def _first_sentence(text: str) -> str:
    """Of the comment that a shipped spec begins with."""
    comment = " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("#"), text.splitlines()))
    return re.split(r"(?<!et al)\. ", comment)[0].rstrip(".")


@main.command("list", epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@guarded
def list_(as_json: bool) -> None:
    """Name what there is: the prelude, functions, schedules, architectures and shipped specs."""
    from attngen.language.prelude import prelude
    from attngen.plan import ARCHES, SCHEDULES
    from attngen.shipped import spec_directory
    from attngen.spec.operator import TABLE
    from attngen.spec.operators import FUNCTIONS

    named = {
        "prelude": {f"{d.name}({', '.join(d.parameters)})" if d.parameters else d.name: "" for d in prelude().values()},
        "functions": {n: TABLE[n].what for n in sorted(FUNCTIONS)},
        "schedules": {name: f"kernel {rung}" for name, rung, _, _ in SCHEDULES},
        "architectures": {a.name: a.what for a in ARCHES.values()},
        "specs": {p.stem: _first_sentence(p.read_text()) for p in sorted(spec_directory().glob("*.attn"))},
    }
    if as_json:
        click.echo(json.dumps(named, indent=2))
        return
    for title, entries in named.items():
        click.echo(click.style(title, bold=True), color=_color(sys.stdout))
        for entry, what in entries.items():
            click.echo(f"  {entry:<30} {what}".rstrip())


@main.command(epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@guarded
def doctor(as_json: bool) -> None:
    """Say what this machine has, what is missing, and how to get it."""
    from dataclasses import asdict

    from attngen.device.machine import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([asdict(f) for f in findings], indent=2))
        return
    for f in findings:
        mark = click.style("have   ", fg="green") if f.found else click.style("missing", fg="yellow")
        click.echo(f"{mark} {f.name:<13} {f.detail}", color=_color(sys.stdout))
        click.echo(f"        {'':<13} for {f.needed}")
        if not f.found:
            click.echo(f"        {'':<13} cure: {f.cure}")
    emulated = next(f for f in findings if f.name == "C++ compiler").found
    gpu = next(f for f in findings if f.name == "GPU").found
    ways = [*(["on the GPU"] if gpu else []), *(["emulated on the CPU"] if emulated else [])]
    click.echo(
        f"\nattngen can build, and run {' and '.join(ways)}"
        if ways
        else "\nattngen can build, but nothing here can run kernels"
    )

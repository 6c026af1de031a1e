"""A kernel -> the page: everything is computed here, the template writes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from attngen.device.cuda.line_table import MachineCode, machine_code
from attngen.emit.kernel_source import KernelSource
from attngen.emit.loops import loop_nest
from attngen.emit.words import equations
from attngen.inspect.checking import Checked
from attngen.inspect.explain_work import defaults
from attngen.inspect.machine_text import spec_lines
from attngen.inspect.opcodes import histogram
from attngen.inspect.report.beside import beside_data
from attngen.inspect.report.code import CLASS_NAMES, code_data
from attngen.inspect.report.levels import levels_data
from attngen.inspect.report.pictures import roofline_plot, tile_map
from attngen.inspect.report.timeline import Timeline, timeline
from attngen.language import Loaded
from attngen.plan import Plan
from attngen.plan.shared_layout import BANK_GROUPS, layouts
from attngen.reference.problems import Shape, sample

HERE = Path(__file__).resolve().parent
PLOT = (460.0, 250.0)  # of the roofline, in units of its picture


@dataclass(frozen=True, slots=True)
class Problem:
    """What the page's map and roofline are of: lengths, one batch, and the values of params."""

    q_len: int
    kv_len: int
    params: Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class Report:
    """The page, and how many of its SASS instructions have a line of CUDA."""

    html: str
    mapped: int
    instructions: int


def report(
    loaded: Loaded,
    plan: Plan,
    source: KernelSource,
    problem: Problem,
    errors: Sequence[Checked] | str,
    pipeline: Timeline | None = None,
) -> Report:
    """The page about `source`. `errors` is what a check found, or why there was none; `pipeline` is of a traced run, None for a
    schematic.

    Raises CompilationError; DeviceError where there is no nvdisasm.
    """
    code = machine_code(source)
    mapped, instructions = code.mapped
    data = {
        **code_data(loaded, source, code, spec_lines(loaded, plan, source)),
        "levels": levels_data(loaded.spec, plan, source.text),
        "beside": beside_data(loaded.spec, plan, source),
    }
    assets = {name: (HERE / f"page.{name}").read_text() for name in ("css", "js")}
    html = (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=f"{loaded.spec.name}, {plan.rung} on {plan.arch.name}",
            loaded=loaded,
            spec=loaded.spec,
            equations=equations(loaded.spec),
            plan=plan,
            source=source,
            nest=loop_nest(loaded.spec, plan, source),
            problem=problem,
            errors=errors,
            mapped=mapped,
            instructions=instructions,
            css=Markup(assets["css"]),
            js=Markup(assets["js"]),
            hashes={name: _digest(text) for name, text in assets.items()},
            data=_as_json(data),
            beside=[other["title"] for other in data["beside"]],
            timeline=pipeline or timeline(loaded.spec, plan),
            **_pictures(loaded, plan, problem, code),
        )
    )
    return Report(html, mapped, instructions)


def _pictures(loaded: Loaded, plan: Plan, problem: Problem, code: MachineCode) -> dict[str, Any]:
    spec = loaded.spec
    shape = Shape(batch=1, q_heads=1, kv_heads=1, q_len=problem.q_len, kv_len=problem.kv_len)
    arrays = sample(spec, shape)
    names = {**shape.sizes(spec), **defaults(spec), **problem.params}
    return {
        "heads": shape.sizes(spec)["q_heads"],
        "tiles": tile_map(spec, plan, arrays, names),
        "layouts": layouts(spec, plan),
        "bank_groups": BANK_GROUPS,
        "roof": roofline_plot(spec, plan, arrays, names, PLOT),
        "plot": PLOT,
        "histogram": histogram(line.text for line in code.sass if line.is_code),
        "classes": CLASS_NAMES,
    }


def _as_json(data: Mapping[str, Any]) -> Markup:
    """JSON that may stand in a script element: no tag can begin in it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))


def _digest(text: str) -> str:
    """As a content security policy names a script or style that it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )

"""The report of a kernel: values are computed here, and the template writes the page."""

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
from attngen.emit.comment_text import backward_equations, equations
from attngen.emit.loops import loop_nest
from attngen.emit.program import Program
from attngen.inspect.checking import Checked
from attngen.inspect.explain_work import defaults
from attngen.inspect.launch_work import launches
from attngen.inspect.machine_text import spec_lines
from attngen.inspect.opcodes import histogram
from attngen.inspect.report.beside import beside_data
from attngen.inspect.report.code import CLASS_NAMES, code_data
from attngen.inspect.report.levels import levels_data
from attngen.inspect.report.pictures import roofline_plot, tile_map
from attngen.inspect.work import launch_roofline
from attngen.language import Loaded
from attngen.plan import Plan
from attngen.plan.shared_memory import BANK_GROUPS
from attngen.reference.problems import Shape, sample
from attngen.schedules.timeline import Timeline, timeline
from attngen.spec.attention import AttentionSpec

HERE = Path(__file__).resolve().parent
PLOT = (460.0, 250.0)  # of the roofline, in units of its picture


@dataclass(frozen=True, slots=True)
class Problem:
    """The problem of the page's map and roofline: lengths, and the values of params; one batch."""

    q_len: int
    kv_len: int
    params: Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class Report:
    """The page, and the number of SASS instructions that have a line of CUDA."""

    html: str
    mapped: int
    instructions: int


def report(
    loaded: Loaded,
    plan: Plan,
    source: Program,
    problem: Problem,
    errors: Sequence[Checked] | str,
    pipeline: Timeline | None = None,
) -> Report:
    """The page about `source`. `errors` are the results of a check, or the reason why there are none; `pipeline` is from a
    traced run, None for a schematic.

    Raises CompilationError, and DeviceError if nvdisasm is missing.
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
            title=f"{loaded.spec.name}, {plan.keyword}{', backward' if plan.wanted else ''} on {plan.arch.name}",
            loaded=loaded,
            spec=loaded.spec,
            equations=_equations(loaded.spec, plan),
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


def _equations(spec: AttentionSpec, plan: Plan) -> list[str]:
    gradient = plan.facts.gradient
    return equations(spec, spec.lse) if gradient is None else backward_equations(spec, gradient, plan.wanted)


def _pictures(loaded: Loaded, plan: Plan, problem: Problem, code: MachineCode) -> dict[str, Any]:
    spec = loaded.spec
    shape = Shape(batch=1, q_heads=1, kv_heads=1, q_len=problem.q_len, kv_len=problem.kv_len)
    arrays = sample(spec, shape)
    names = {**shape.sizes(spec), **defaults(spec), **problem.params}
    return {
        "heads": shape.sizes(spec)["q_heads"],
        "tiles": tile_map(spec, plan, arrays, names),
        "layouts": plan.schedule.layouts(spec, plan),
        "bank_groups": BANK_GROUPS,
        "roof": roofline_plot(spec, plan, arrays, names, PLOT),
        "launches": [(one, launch_roofline(spec, plan, one)) for one in launches(spec, plan, arrays, names)]
        if plan.wanted
        else [],
        "plot": PLOT,
        "histogram": histogram(line.text for line in code.sass if line.is_code),
        "classes": CLASS_NAMES,
    }


def _as_json(data: Mapping[str, Any]) -> Markup:
    """JSON for a script element: `<` is escaped, so that no tag can begin in it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))


def _digest(text: str) -> str:
    """The name of a script or style in a content security policy."""
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

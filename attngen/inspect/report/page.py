"""The report of a kernel: values are computed here, and the template writes the page."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from attngen.device.cuda.line_table import MachineCode, machine_code
from attngen.drawings.banks import layout_picture, layout_words
from attngen.drawings.theme import DARK, LIGHT, declared, style
from attngen.drawings.tiles import tiles_picture
from attngen.drawings.timeline import Timeline, timeline_picture
from attngen.emit.comment_text import backward_equations, equations
from attngen.emit.loops import loop_nest
from attngen.emit.program import Program
from attngen.inspect.call import Call
from attngen.inspect.checking import Checked
from attngen.inspect.drawn import tile_map
from attngen.inspect.machine_text import spec_lines
from attngen.inspect.opcodes import histogram
from attngen.inspect.report.code import CLASS_NAMES, code_data
from attngen.inspect.report.other_files import beside_data, levels_data
from attngen.inspect.report.pictures import roofline_plot
from attngen.inspect.work import roofline
from attngen.language import Loaded
from attngen.plan import Plan
from attngen.spec.attention import AttentionSpec

HERE = Path(__file__).resolve().parent
PLOT = (460.0, 250.0)  # width and height of the roofline, in units of its picture


@dataclass(frozen=True, slots=True)
class Report:
    """The page, and the number of SASS instructions that have a line of CUDA."""

    html: str
    mapped: int
    instructions: int


def report(
    loaded: Loaded,
    source: Program,
    call: Call,
    errors: Sequence[Checked] | str,
    pipeline: Timeline | str,
) -> Report:
    """The page about `source`, the program of `call`, which the map and the roofline are of. `errors` are the results of a
    check, and `pipeline` is that of a traced run; or the reasons why there are none.

    Raises CompilationError, and DeviceError if nvdisasm is missing.
    """
    spec, plan, code = loaded.spec, call.plan, machine_code(source)
    mapped, instructions = code.mapped
    beside = [*beside_data(spec, plan, source.text)]
    data = {
        **code_data(loaded, source, code, spec_lines(loaded, plan, source)),
        "levels": levels_data(spec, plan, source.text),
        "beside": beside,
    }
    assets = {name: (HERE / f"page.{name}").read_text("utf-8") for name in ("css", "js")}
    colours = declared(":root", LIGHT) + declared(':root[data-theme="dark"]', DARK)
    assets["css"] = colours + style() + assets["css"]
    html = (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=f"{spec.name}, {plan.keyword}{', backward' if plan.wanted else ''} on {plan.arch.name}",
            loaded=loaded,
            spec=spec,
            equations=_equations(spec, plan),
            plan=plan,
            source=source,
            nest=loop_nest(spec, plan, source),
            call=call,
            errors=errors,
            mapped=mapped,
            instructions=instructions,
            css=Markup(assets["css"]),
            js=Markup(assets["js"]),
            hashes={name: _digest(text) for name, text in assets.items()},
            data=_as_json(data),
            beside=[other["title"] for other in beside],
            pipeline=pipeline,
            timeline=None
            if isinstance(pipeline, str)
            else Markup(timeline_picture(pipeline, pipeline.says).inline("timeline")),
            **_pictures(call, code),
        )
    )
    return Report(html, mapped, instructions)


def _equations(spec: AttentionSpec, plan: Plan) -> list[str]:
    gradient = plan.facts.gradient
    return equations(spec, spec.lse) if gradient is None else backward_equations(spec, gradient, plan.wanted)


def _pictures(call: Call, code: MachineCode) -> dict[str, object]:
    spec, plan = call.spec, call.plan
    tiles, layouts = tile_map(call), plan.schedule.layouts(spec, plan)
    return {
        "heads": call.names["q_heads"],
        "tiles": tiles,
        "tile_map": None if tiles is None else Markup(tiles_picture(tiles, "The tiles of one head").inline("map")),
        "layouts": layouts,
        "banks": [(one, layout_words(one), Markup(layout_picture(one).inline("banks"))) for one in layouts],
        "roof": roofline_plot(call, PLOT),
        "launches": [(one, roofline(spec, plan, one)) for one in call.work().launches],
        "plot": PLOT,
        "histogram": histogram(line.text for line in code.sass if line.is_code),
        "classes": CLASS_NAMES,
    }


def _as_json(data: Mapping[str, object]) -> Markup:
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

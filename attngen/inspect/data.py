"""The output of `explain` and `show` as plain values for JSON. docs/json.md defines every key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from attngen.device.cuda.compiler import compile_text, nvrtc_version
from attngen.device.cuda.line_table import MachineLine
from attngen.device.protocol import DeviceError
from attngen.emit.comment_text import backward_equations
from attngen.emit.kernel_maker import shared_ranges
from attngen.emit.loops import loop_nest
from attngen.emit.manifest import to_manifest
from attngen.emit.program import Program
from attngen.inspect.call import Call
from attngen.inspect.conditions import tile_text
from attngen.inspect.launch_work import LaunchWork
from attngen.inspect.machine_text import spec_lines
from attngen.inspect.occupancy import kernel_resources
from attngen.inspect.work import roofline
from attngen.language import Loaded
from attngen.language.syntax import Node
from attngen.plan import Plan
from attngen.plan.block_map import KIND_NAMES, count_kinds
from attngen.plan.mask_bounds import MaskBounds
from attngen.reference.problems import Array
from attngen.spec.attention import AttentionSpec
from attngen.spec.print_attn import dtypes_to_text, expression_to_text, rotary_to_text

MOST_OF_MAP = 2**22  # tiles: more are counted and not listed


def tree_data(nodes: Sequence[Node]) -> list[dict[str, object]]:
    return [
        {
            "kind": n.kind,
            "value": n.value if isinstance(n.value, (str, int, float, bool)) or n.value is None else str(n.value),
            "line": n.span.line,
            "column": n.span.column,
            "children": tree_data(n.children),
        }
        for n in nodes
    ]


def spec_data(spec: AttentionSpec) -> dict[str, object]:
    """Every field of a spec; expressions are texts of the language."""
    return {
        "name": spec.name,
        "dtype": dtypes_to_text(spec),
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "values": spec.values,
        "q_heads": spec.q_heads,
        "kv_heads": spec.kv_heads,
        "inputs": [{"name": i.name, "dtype": i.dtype.name, "dims": list(i.dims)} for i in spec.inputs],
        "params": [{"name": p.name, "type": str(p.type), "default": p.default} for p in spec.params],
        **statements(spec),
        "kernel": asdict(spec.kernel),
    }


def statements(spec: AttentionSpec) -> dict[str, str | bool | None]:
    """The statements of a spec about scores and weights; None: it has none."""
    return {
        "scale": expression_to_text(spec.scale),
        "mask": None if spec.mask is None else expression_to_text(spec.mask),
        "score": expression_to_text(spec.score),
        "normalize": spec.normalize,
        "sink": None if spec.sink is None else expression_to_text(spec.sink),
        "dropout": None if spec.dropout is None else expression_to_text(spec.dropout),
        "rotary": None if spec.rotary is None else rotary_to_text(spec.rotary),
        "v_scale": None if spec.v_scale is None else expression_to_text(spec.v_scale),
        "lse": spec.lse,
        "precision": spec.precision,
    }


def plan_data(plan: Plan) -> dict[str, object]:
    """A plan: its tile, its decisions with their reasons, the map of shared memory."""
    return {
        "schedule": plan.keyword,
        "template": plan.schedule.name,
        "arch": plan.arch.name,
        "block_q": plan.block_q,
        "block_kv": plan.block_kv,
        "warps": plan.warps,
        "stages": plan.stages,
        "decisions": [{"field": d.field, "value": d.value, "because": d.because} for d in plan.decisions],
        "shared_bytes": plan.shared_bytes,
        "shared_limit": plan.arch.shared_per_block,
        "shared_buffers": [asdict(b) for b in shared_ranges(plan)],
    }


def loops_data(spec: AttentionSpec, plan: Plan, source: Program) -> list[dict[str, object]]:
    nest = ((p, p.loop) for p in loop_nest(spec, plan, source))
    return [
        {"line": p.line, "depth": p.depth, "name": one.name, "range": one.range, "run_by": one.role, "memory": one.memory}
        for p, one in nest
    ]


def cuda_data(source: Program) -> dict[str, object]:
    manifest: dict[str, object] = json.loads(to_manifest(source))
    return {"text": source.text, "manifest": manifest}


def machine_data(loaded: Loaded, plan: Plan, source: Program, code: Iterable[MachineLine]) -> list[dict[str, object]]:
    """PTX or SASS, each line with the lines of CUDA and of the spec that it comes from, the innermost first."""
    of_spec = spec_lines(loaded, plan, source)
    return [
        {
            "text": line.text.strip(),
            "is_instruction": line.is_code,
            "cuda": list(line.cuda),
            "spec": list(dict.fromkeys(n for at in line.cuda for n in of_spec.get(at, ()))),
        }
        for line in code
    ]


def explain_data(call: Call, source: Program) -> dict[str, object]:
    """The plan, its kernels' resources, the work of a call, the roofline, and the tiles of one head."""
    spec, plan, cost = call.spec, call.plan, call.work()
    roof = roofline(spec, plan, cost)
    of_launches = [_launch_data(spec, plan, one) for one in cost.launches]
    gradient = plan.facts.gradient
    return {
        "attention": spec.name,
        **({"gradients": list(plan.wanted), "equations": backward_equations(spec, gradient, plan.wanted)} if gradient else {}),
        "plan": plan_data(plan),
        "kernels": _kernels(plan, source),
        "call": {"batch": 1, "q_len": call.q_len, "kv_len": call.kv_len, "params": call.numbers},
        "work": {**asdict(cost), "intensity": cost.intensity, "launches": of_launches},
        "roofline": {**asdict(roof), "ridge": roof.ridge, "gpu": plan.arch.gpu},
        **({} if gradient else {"tiles": _tiles(plan.bounds, call.tiles())}),
    }


def _launch_data(spec: AttentionSpec, plan: Plan, launch: LaunchWork) -> dict[str, object]:
    roof = roofline(spec, plan, launch)
    return {**asdict(launch), "microseconds": roof.microseconds, "by_memory": roof.by_memory}


def _kernels(plan: Plan, source: Program) -> dict[str, object]:
    try:
        version = nvrtc_version()
    except DeviceError as error:
        return {"compiler": None, "missing": str(error), "resources": []}
    resources = kernel_resources(source, plan.arch, compile_text(source).resources())
    return {"compiler": f"NVRTC {version}", "missing": None, "resources": [asdict(r) for r in resources]}


def _tiles(bounds: MaskBounds, kinds: Array | None) -> dict[str, object] | None:
    if kinds is None:
        return None
    full = (bounds.full_begin, bounds.full_end)
    return {
        "kv_begin": tile_text(bounds.begin),
        "kv_end": tile_text(bounds.end),
        "full_begin": None if full[0] is None else tile_text(full[0]),
        "full_end": None if full[1] is None else tile_text(full[1]),
        "may": tile_text(bounds.may) if bounds.per_tile else None,
        "must": tile_text(bounds.must) if bounds.per_tile else None,
        "counts": count_kinds(kinds),
        "map": None if kinds.size > MOST_OF_MAP else [[KIND_NAMES[int(kind)] for kind in row] for row in kinds],
    }

"""Plans, specs and tile maps as text for a terminal."""

from __future__ import annotations

from textwrap import wrap

from attngen.emit.comment_text import backward_equations
from attngen.inspect.call import Call
from attngen.inspect.conditions import conditions, tile_text
from attngen.inspect.data import statements
from attngen.language.syntax import Node
from attngen.plan import Plan
from attngen.plan.block_map import EMPTY, FULL, PARTIAL
from attngen.plan.mask_bounds import MaskBounds
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Const, Expr
from attngen.spec.operator import FALSE
from attngen.spec.print_attn import dtypes_to_text, kernel_to_text

STATED = {"v_scale": ("scale of V", "1")}  # how a statement is shown, and its absence, if not by its name and "none"
GLYPHS = {EMPTY: ".", PARTIAL: "/", FULL: "#"}
WIDTH = 100
MAX_MAP = 64  # rows and columns of a map


def explain_plan(spec: AttentionSpec, plan: Plan) -> str:
    """Every decision with its reason, then the memory map."""
    lines = [f"{spec.name} on {plan.arch.name} ({plan.arch.what}): {plan.title}", ""]
    for d in plan.decisions:
        lines.append(f"  {d.field} = {d.value}")
        lines += wrap(d.because, WIDTH, initial_indent="      ", subsequent_indent="      ")
    if plan.buffers:
        lines += ["", f"shared memory of a block: {plan.used_shared} of {plan.arch.shared_per_block} bytes{plan.shared_more}"]
        lines += [f"  {b.offset:>7}  {b.bytes:>6}  {b.name:<3} {b.what}" for b in plan.buffers]
    return "\n".join(lines) + "\n"


def explain_gradients(spec: AttentionSpec, plan: Plan) -> str:
    """The derived equations of a backward, in the notation of a generated file's header."""
    gradient = plan.facts.gradient
    assert gradient is not None
    lines = [f"gradients of {spec.name}, for batch b, query head h and query row q:", ""]
    lines += [f"  {line}" for line in backward_equations(spec, gradient, plan.wanted)]
    read = [f"{one.name}: by {one.access}" for one in gradient.captured if one.name in plan.wanted]
    return "\n".join([*lines, *(["", f"  additions to captured tensors: {', '.join(read)}"] if read else [])]) + "\n"


def explain_tiles(call: Call) -> str:
    """The closed-form bounds, and a map of the tiles of one head."""
    plan, bounds, kinds = call.plan, call.plan.bounds, call.tiles()
    if kinds is None:
        return "the naive kernels compute every pair\n"
    lines = [f"tiles of {plan.block_q} rows x {plan.block_kv} keys", f"  kv_begin = {tile_text(bounds.begin)}"]
    lines.append(f"  kv_end   = {tile_text(bounds.end)}")
    if bounds.full_begin is not None and bounds.full_end is not None:
        lines.append(f"  every pair is allowed from {tile_text(bounds.full_begin)} to {tile_text(bounds.full_end)}")
    else:
        lines += [f"  {line}" for line in conditions(_classes(bounds), WIDTH)]
        lines += ["  no tile is known to be full: each pair is tested"] * (bounds.must is FALSE)
    counts = {kind: int((kinds == kind).sum()) for kind in GLYPHS}
    note = " (captured tensors: sample values)" if call.spec.inputs else ""
    lines += ["", f"q_len {call.q_len}, kv_len {call.kv_len}, batch 0, head 0{note}; one row a block, one column a tile:"]
    lines += ["  " + "".join(GLYPHS[int(k)] for k in row[:MAX_MAP]) for row in kinds[:MAX_MAP]]
    if max(kinds.shape, default=0) > MAX_MAP:
        lines.append(f"  (the first {MAX_MAP} rows and columns)")
    lines.append(f"  {counts[FULL]} full (#), {counts[PARTIAL]} partial (/), {counts[EMPTY]} empty and never loaded (.)")
    own = call.tiles(plan.tile_rows)
    if own is not None and plan.tile_rows < plan.block_q:
        of_blocks = (kinds != EMPTY).sum(1)
        loaded = (
            int(of_blocks.sum()) * plan.block_q - int(of_blocks[:1].sum()) * plan.missing_rows(call.q_len)
        ) // plan.tile_rows
        lines += wrap(
            f"a consumer multiplies those with keys for its own {plan.tile_rows} rows: of {loaded} tiles of "
            f"{plan.tile_rows} x {plan.block_kv} that are loaded {int((own == FULL).sum())} are full, "
            f"{int((own == PARTIAL).sum())} partial",
            WIDTH, initial_indent="  ", subsequent_indent="  ",
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _classes(bounds: MaskBounds) -> dict[str, Expr]:
    """The conditions that classify a tile, by title."""
    titled = {"a tile may hold an allowed pair if": bounds.may, "every pair of a tile is allowed if": bounds.must}
    return {title: condition for title, condition in titled.items() if not isinstance(condition, Const)}


def describe_spec(spec: AttentionSpec) -> str:
    """Every field of a spec, one per line."""
    shown: dict[str, object] = {
        "name": spec.name,
        "dtype": dtypes_to_text(spec),
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "values": "V" if spec.values is None else "k[{}:{}]".format(*spec.values),
        "heads": "as the tensors have" if spec.q_heads is None else f"{spec.q_heads} over {spec.kv_heads}",
        "inputs": ", ".join(f"{i.name}: {i.dtype}[{', '.join(map(str, i.dims))}]" for i in spec.inputs) or "none",
        "params": ", ".join(f"{p.name}: {p.type} = {p.default}" for p in spec.params) or "none",
    }
    for name, value in statements(spec).items():
        title, absent = STATED.get(name, (name, "none"))
        shown[title] = absent if value is None else value
    shown["kernel"] = kernel_to_text(spec.kernel)
    return "".join(f"{field:<11}{value}\n" for field, value in shown.items())


def describe_tree(nodes: tuple[Node, ...], depth: int = 0) -> str:
    """The syntax tree, one node a line."""
    lines = []
    for node in nodes:
        value = "" if node.value is None else f" {node.value!r}"
        lines.append(f"{'  ' * depth}{node.kind}{value}  ({node.span.line}:{node.span.column})\n")
        lines.append(describe_tree(node.children, depth + 1))
    return "".join(lines)

"""What pages show of this schedule: its loops, its tiles in shared memory, its timeline."""

from __future__ import annotations

from attngen.emit.loops import Loop, kernel, tiles_visited
from attngen.plan.plan import Plan
from attngen.schedules.parts.loops import pv_by_wgmma, qk_by_wgmma
from attngen.schedules.timeline import COPY, PRODUCT, SOFTMAX, TILES, Bar, Timeline
from attngen.spec.attention import AttentionSpec


def loops(spec: AttentionSpec, plan: Plan) -> dict[str, Loop]:
    stages, visited = f"pipeline stage, 1 of {plan.stages}", tiles_visited(plan)
    own = f"{visited}, of its own {plan.tile_rows} rows" if plan.tile_rows < plan.block_q else visited
    each, replaced = f"{plan.block_kv // 2} of a thread", "S: registers, P in their place"
    weights = Loop("the weights of S", each, "thread, unrolled", replaced, "void score_tile() {")
    products = (qk_by_wgmma(spec, plan.own.q_in_registers), weights, pv_by_wgmma(plan))
    moved = "K, and V by another warp: global to shared by TMA"
    copied = Loop("keys", visited, stages, moved, "load_key_tile(tile")
    multiplied = Loop("keys", own, stages, "K, V: shared", "step<false>()", products)

    def role(name: str, who: str, moved: str, line: str, keys: Loop) -> Loop:
        return Loop(f"{name}: work tiles", "from a counter", who, moved, line, (keys,))

    def loader(moved: str) -> Loop:
        copied = Loop("keys", visited, "warp", moved, "void load_pair_tile(")
        return role("elements of pairs", "two warps", moved, "void load_pairs(int first) {", copied)

    rows = f"Q: {plan.block_q} rows, global to shared by TMA"
    warpgroups, stored = f"{plan.own.consumers} warpgroups", "O: 64 rows a warpgroup, registers to shared to global"
    producer = role("producer", "one warp", rows, "for (int next = blockIdx.x; next < works;", copied)
    return {
        "hopper": kernel(
            "one for each SM",
            producer,
            *(loader(f"{e.gather.input}: global to shared by cp.async") for e in plan.staged.pairs),
            role("consumers", warpgroups, stored, "while (q_block != END)", multiplied),
        )
    }


def timeline(plan: Plan, weights: str) -> Timeline:
    """The consumers take turns on the tensor cores; a copy starts when its stage is empty."""
    lanes: dict[str, tuple[Bar, ...]] = {}
    qk_end, pv_end = [0.0] * TILES, [0.0] * TILES  # when the last consumer is done with a tile
    step = 2.0
    each = step / (2 * plan.own.consumers)  # time of a product: together they keep the tensor cores busy
    for c in range(plan.own.consumers):
        products, between = [], []
        for n in range(TILES + 1):
            start = 0.6 + 2 * c * each + step * n
            if n < TILES:
                products.append(Bar(start, each, f"Q K{n}", PRODUCT))
                between.append(Bar(start + each, step - 1.2 * each, f"{weights} {n}", SOFTMAX))
                qk_end[n] = start + each
            if n > 0:
                products.append(Bar(start + each, each, f"P V{n - 1}", PRODUCT))
                pv_end[n - 1] = start + 2 * each
        lanes[f"wgmma, consumer {c + 1}"] = tuple(products)
        lanes[f"{weights}, consumer {c + 1}"] = tuple(between)
    copies: list[Bar] = []
    for n in range(TILES):
        for name, free in (("K", qk_end), ("V", pv_end)):
            empty = free[n - plan.stages] if n >= plan.stages else 0.0
            copies.append(Bar(max(empty, copies[-1].end if copies else 0.0), 0.5, f"{name}{n}", COPY))
    says = (
        f"The producer copies as soon as one of {plan.stages} stages is empty. Of each consumer the tensor cores multiply the "
        f"next keys and this tile's values while its threads compute the {weights} between; the consumers take turns."
    )
    return Timeline({"producer, TMA": tuple(copies), **lanes}, says)

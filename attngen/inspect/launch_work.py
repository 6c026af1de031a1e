"""The work of a backward, launch by launch: the products that each computes, and the tensors that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from attngen.emit.abi import is_of_pairs
from attngen.emit.emitter import emit
from attngen.emit.program import MULTIPROCESSORS, KernelEntry, Tensor, evaluate
from attngen.inspect.blocks import OF_KEYS, held_by
from attngen.plan import Plan
from attngen.plan.block_map import classify_tiles, pairs_visited
from attngen.plan.products import computed_products, counted_products
from attngen.reference.problems import Sample, Shape
from attngen.reference.stored import stored_sizes
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import DTYPES, from_storage


@dataclass(frozen=True, slots=True)
class LaunchWork:
    """One launch, batch 1, every head taken to be like head 0."""

    kernel: str  # without the name of the attention
    products: tuple[str, ...]
    visited_pairs: int
    computed: int  # operations of its products, over the pairs of the tiles that it visits
    bytes: int  # the size of its tensors, each once; what it changes in place counts twice


def launches(spec: AttentionSpec, plan: Plan, problem: Sample, names: Mapping[str, int | float]) -> Iterator[LaunchWork]:
    """The launches of a backward, in order. `names` are all sizes and params."""
    program = emit(spec, plan)
    sizes = {name: int(value) for name, value in names.items() if isinstance(value, int)}
    sizes |= stored_sizes(spec, Shape(batch=sizes["batch"], q_len=sizes["q_len"], kv_len=sizes["kv_len"]))
    sizes[MULTIPROCESSORS] = 0  # unknown: groups of heads are then not divided
    heads = sizes["batch"] * sizes["q_heads"]
    tensors, written = {t.name: t for t in program.tensors}, set[str]()
    dims, of_kernels = counted_products(spec, plan.wanted), computed_products(plan)
    visited = _visited(plan, problem, names)
    for entry in program.kernels:
        if 0 in [component.whole(sizes) for component in entry.grid]:
            continue
        kernel = entry.name.removeprefix(f"{spec.name}{plan.suffix}_")
        products = of_kernels.get(kernel, ())
        pairs = visited(plan.schedule.visits_rows and kernel in OF_KEYS) if products else 0

        def size_of(tensor: Tensor) -> int:
            element = DTYPES[tensor.dtype].bytes
            if tensor.role == "workspace" and is_of_pairs(tensor):
                return heads * element * visited(False, whole=True)
            return element * prod(evaluate(extent, sizes) for extent in tensor.shape)

        moved, changed = _moved(entry, tensors, written)
        total = sum(size_of(t) * (2 if t.name in changed else 1) for t in moved)
        computed = heads * pairs * 2 * sum(dims[product] for product in products)
        yield LaunchWork(kernel, products, heads * pairs, computed, total)


def _moved(entry: KernelEntry, tensors: Mapping[str, Tensor], written: set[str]) -> tuple[list[Tensor], set[str]]:
    """The tensors of a launch, and those that an earlier launch has `written` and this one changes."""
    moved, changed = {}, set()
    for parameter in entry.parameters:
        if parameter.binding not in ("data", "map", "packed_map", "paged_map") or tensors[parameter.of].role == "counter":
            continue
        tensor = moved[parameter.of] = tensors[parameter.of]
        if tensor.is_written and "const" not in parameter.ctype:
            changed |= {parameter.of} & written
            written.add(parameter.of)
    return list(moved.values()), changed


def _visited(plan: Plan, problem: Sample, names: Mapping[str, int | float]) -> Callable[..., int]:
    """The pairs of the tiles of head 0 that kernels visit whose blocks own keys, or rows; `whole`: past the last key too."""
    inputs = {name: from_storage(array) for name, array in problem.inputs.items()}
    q_len, kv_len = problem.q.shape[2], problem.k.shape[2]
    at = {**names, "b": 0, "h": 0}
    rows_of_block, keys_of_block = held_by(plan)

    def pairs(of_keys: bool, whole: bool = False) -> int:
        if not plan.schedule.is_tiled:
            return int(q_len * kv_len)
        bounds = plan.row_bounds if of_keys else plan.bounds
        assert bounds is not None
        block_q, block_kv = (plan.block_q, keys_of_block) if of_keys else (rows_of_block, plan.block_kv)
        kinds = classify_tiles(bounds, block_q, block_kv, at, inputs)
        return pairs_visited(kinds.T if of_keys else kinds, (q_len, kv_len), (block_q, block_kv), whole)

    return pairs

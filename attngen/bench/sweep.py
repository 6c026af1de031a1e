"""A spec measured over lengths, head sizes and element types, beside what a user would pick instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import attngen.torch  # noqa: F401  (kernels are then called through its operator, as users call them)
from attngen.api import CompiledAttention, compile
from attngen.bench.measure import Ceilings, ceilings, measure, peak_bytes
from attngen.bench.peers import flash_peers, flex_peer, torch_peers
from attngen.bench.report import Measured
from attngen.reference.problems import Shape, sample_inputs
from attngen.reference.torch_oracle import allowed_pairs, to_torch, torch_attention
from attngen.spec.attention import RUNGS, AttentionSpec, Rung
from attngen.spec.check import check
from attngen.spec.dtypes import DTYPES

SLOW_RUNGS_UP_TO = 4096  # naive and tiled keep S x S scores, and are there to be compared, not to be waited for


@dataclass(frozen=True, slots=True)
class Case:
    """One problem. The batch makes the same number of tokens at every length."""

    spec: AttentionSpec
    masked: bool
    batch: int
    q_heads: int
    kv_heads: int
    length: int

    @property
    def title(self) -> str:
        """As a table's row begins."""
        s = self.spec
        sizes = f"D{s.head_dim}" + (f"/{s.head_dim_v}" if s.head_dim_v != s.head_dim else "")
        heads = "H" + self.heads.replace(" over ", "/")
        return f"{s.dtype.name} {sizes} {'masked' if self.masked else 'full'} B{self.batch} {heads} S{self.length}"

    @property
    def heads(self) -> str:
        """As the language writes them."""
        return f"{self.q_heads}" + (f" over {self.kv_heads}" if self.kv_heads != self.q_heads else "")


def cases(
    spec: AttentionSpec, lengths: list[int], dtypes: list[str], head_dims: list[int], also_full: bool, tokens: int
) -> Iterator[Case]:
    """Every combination, the spec checked anew for each. Raises DiagnosticError for one that cannot be."""
    for dtype in dtypes or [spec.dtype.name]:
        for head_dim in head_dims or [spec.head_dim]:
            variant = replace(spec, dtype=DTYPES[dtype])
            if head_dim != spec.head_dim:
                variant = replace(variant, head_dim=head_dim, head_dim_v=head_dim)
            check(variant)
            variants = [(variant, spec.mask is not None)]
            if also_full and spec.mask is not None:
                variants.append((_without_mask(variant), False))
            for one, masked in variants:
                heads = one.q_heads or max(1, 2048 // head_dim)
                for length in lengths:
                    yield Case(one, masked, max(1, tokens // length), heads, one.kv_heads or heads, length)


def _without_mask(spec: AttentionSpec) -> AttentionSpec:
    from attngen.spec.expr import inputs_in, names_in

    rest = [e for e in (spec.score, spec.scale, spec.sink) if e is not None]
    inputs = tuple(i for i in spec.inputs if i.name in inputs_in(*rest))
    params = tuple(p for p in spec.params if p.name in names_in(*rest))
    return replace(spec, mask=None, inputs=inputs, params=params)


def run(
    todo: list[Case],
    params: Mapping[str, int | float],
    rounds: int,
    progress: Callable[[str], None],
    rungs: Sequence[Rung] = (*RUNGS, "auto"),
) -> Iterator[Measured]:
    """Measure `rungs` and the peers on every case, one result after the other. `progress` receives a line for each case.

    "auto" is measured as the rung that it selects on this GPU, and is named after it.
    """
    highest: dict[str, Ceilings] = {}
    for number, case in enumerate(todo, 1):
        progress(f"[{number}/{len(todo)}] {case.title}")
        dtype = case.spec.dtype
        if dtype.name not in highest:
            highest[dtype.name] = ceilings(getattr(torch, dtype.torch))
        yield from _case(case, params, rounds, highest[dtype.name], progress, rungs)
        torch.cuda.empty_cache()


def _case(
    case: Case,
    params: Mapping[str, int | float],
    rounds: int,
    highest: Ceilings,
    progress: Callable[[str], None],
    rungs: Sequence[Rung],
) -> Iterator[Measured]:
    spec = case.spec
    q, k, v, inputs, own = problem(case, params)
    calls: dict[str, Callable[[], Any]] = {}
    for rung in rungs:
        if rung not in ("naive", "tiled") or case.length <= SLOW_RUNGS_UP_TO:
            kernel = compile(spec, kernel=rung, device="cuda")
            calls[f"attngen {kernel.plan.rung}"] = partial(_call, kernel, (q, k, v), {**inputs, **own})
    calls |= torch_peers(spec, q, k, v)
    calls |= flash_peers(spec, q, k, v)
    calls |= flex_peer(spec, q, k, v, inputs, own, progress)
    errors = _errors(calls, partial(torch_attention, spec, q, k, v, inputs=inputs, params=own), progress)
    output_bytes = case.batch * case.q_heads * case.length * spec.head_dim_v * q.element_size()
    peaks = _peaks(calls, progress)
    calls = {name: call for name, call in calls.items() if name in peaks}
    timings = measure(calls, rounds)
    operations = 2 * (spec.head_dim + spec.head_dim_v) * allowed_pairs(spec, q, k, inputs, own)
    moved = output_bytes + sum(t.numel() * t.element_size() for t in (q, k, v, *inputs.values()))
    for name, timing in timings.items():
        tflops = operations / (timing.median * 1e9)
        yield Measured(
            case.title, spec.dtype.name, spec.head_dim, case.heads, case.masked, case.length, name, timing, tflops,
            tflops / highest.matmul, moved / (timing.median * 1e9) / highest.copy, peaks[name], errors[name],
        )  # fmt: skip


Tensors = dict[str, Any]


def problem(case: Case, params: Mapping[str, int | float]) -> tuple[Any, Any, Any, Tensors, dict[str, int | float]]:
    """(q, k, v, inputs, params) of a case, randn."""
    spec = case.spec
    element = getattr(torch, spec.dtype.torch)

    def randn(heads: int, size: int) -> torch.Tensor:
        return torch.randn(case.batch, heads, case.length, size, device="cuda").to(element)

    q, k, v = randn(case.q_heads, spec.head_dim), randn(case.kv_heads, spec.head_dim), randn(case.kv_heads, spec.head_dim_v)
    shape = Shape(case.batch, case.q_heads, case.kv_heads, case.length, case.length)
    inputs = {n: to_torch(a, "cuda") for n, a in sample_inputs(spec, shape).items()}
    return q, k, v, inputs, {p.name: params[p.name] for p in spec.params if p.name in params}


def _call(kernel: CompiledAttention, tensors: tuple[torch.Tensor, ...], named: dict[str, Any]) -> Any:
    result = kernel(*tensors, **named)
    return result[0] if isinstance(result, tuple) else result


def _errors(
    calls: Mapping[str, Callable[[], Any]], oracle: Callable[[], tuple[Any, Any]], progress: Callable[[str], None]
) -> Mapping[str, float | None]:
    """The largest error of each call. None if the float64 scores of the oracle do not fit the GPU's memory."""
    try:
        truth, _ = oracle()
        return {name: _error(call(), truth) for name, call in calls.items()}
    except torch.OutOfMemoryError:
        progress("errors are left out: the float64 reference does not fit the memory of this GPU")
        return dict.fromkeys(calls)
    finally:
        torch.cuda.empty_cache()


def _peaks(calls: Mapping[str, Callable[[], Any]], progress: Callable[[str], None]) -> dict[str, int]:
    """What each call allocates at its peak. A call that runs out of memory is left out."""
    found = {}
    for name, call in calls.items():
        try:
            found[name] = peak_bytes(call)
        except torch.OutOfMemoryError:
            progress(f"{name} is left out: it does not fit the memory of this GPU")
        torch.cuda.empty_cache()
    return found


def _error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).abs().max())


def where() -> str:
    """The GPU and the versions that a figure depends on."""
    cudnn = torch.backends.cudnn.version() or 0
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {cudnn // 10000}.{cudnn // 100 % 100}"

"""A spec measured over lengths, head sizes and element types, beside its alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import attngen.torch  # noqa: F401  (kernels are then called through its operator, as users call them)
from attngen.api import CompiledAttention, compile
from attngen.backward import CompiledBackward
from attngen.bench.arguments import arguments, in_storage
from attngen.bench.gradients import kernel_call, peer_calls, relative_error
from attngen.bench.measure import Ceilings, ceilings, measure, peak_bytes
from attngen.bench.peers import flash_peers, flex_peer, torch_peers
from attngen.bench.report import Measured
from attngen.keywords import PORTABLE_SCHEDULES, ScheduleName
from attngen.plan.facts import DETERMINISTIC
from attngen.plan.products import operations_of_a_pair
from attngen.reference.problems import Shape, sample_inputs
from attngen.reference.torch_oracle import allowed_pairs, to_torch, torch_attention, torch_gradients
from attngen.schedules import UNFUSED
from attngen.spec.attention import AttentionSpec
from attngen.spec.check import check
from attngen.spec.dtypes import DTYPES

Tensors = dict[str, torch.Tensor]
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Params = dict[str, int | float]

SLOW_SCHEDULES_UP_TO = 4096  # rows, by schedules that store S x S scores: longer problems take too long


@dataclass(frozen=True, slots=True)
class Case:
    """One problem. The batch makes the same number of tokens at every length."""

    spec: AttentionSpec
    masked: bool
    batch: int
    q_heads: int
    kv_heads: int
    length: int
    rows: int | None = None  # query rows of a sequence, if fewer than its keys

    @property
    def q_len(self) -> int:
        return self.length if self.rows is None else self.rows

    @property
    def title(self) -> str:
        """The case as the first cell of a row."""
        s = self.spec
        sizes = f"D{s.head_dim}" + (f"/{s.head_dim_v}" if s.head_dim_v != s.head_dim else "")
        heads = "H" + self.heads.replace(" over ", "/")
        lengths = f"{self.length}" if self.rows is None else f"{self.rows}/{self.length}"
        return f"{s.dtype.name} {sizes} {'masked' if self.masked else 'full'} B{self.batch} {heads} S{lengths}"

    @property
    def heads(self) -> str:
        """The heads as the language writes them."""
        return f"{self.q_heads}" + (f" over {self.kv_heads}" if self.kv_heads != self.q_heads else "")


def cases(
    spec: AttentionSpec, lengths: list[int], dtypes: list[str], head_dims: list[int], also_full: bool, tokens: int
) -> Iterator[Case]:
    """Every combination. Raises DiagnosticError for one that is not a valid spec."""
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

    rest = [e for statement, e in spec.expressions.items() if statement != "mask"]
    inputs = tuple(i for i in spec.inputs if i.name in inputs_in(*rest))
    params = tuple(p for p in spec.params if p.name in names_in(*rest))
    return replace(spec, mask=None, inputs=inputs, params=params)


def run(
    todo: list[Case],
    params: Mapping[str, int | float],
    rounds: int,
    progress: Callable[[str], None],
    schedules: Sequence[ScheduleName] = (*PORTABLE_SCHEDULES, "auto"),
    wanted: tuple[str, ...] = (),
    deterministic: bool = DETERMINISTIC,
) -> Iterator[Measured]:
    """Measure `schedules` and the peers on every case, one result at a time: the forward, or the backward alone with the
    gradients `wanted`. `progress` receives a line for each case.

    "auto" is measured, and named, as the schedule that it selects on this GPU.
    """
    highest: dict[str, Ceilings] = {}
    for number, case in enumerate(todo, 1):
        progress(f"[{number}/{len(todo)}] {case.title}")
        dtype = case.spec.dtype
        if dtype.name not in highest:
            highest[dtype.name] = ceilings(getattr(torch, dtype.torch))
        yield from _case(case, params, rounds, highest[dtype.name], progress, schedules, wanted, deterministic)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is measured on a case."""

    calls: dict[str, Callable[[], object]]  # by candidate
    truth: Callable[[], object]  # what a call returns, in float64
    error: Callable[[Any, Any], float]  # the error of what a call returned, given the truth
    bytes_moved: int  # if each tensor is moved once


def _case(
    case: Case,
    params: Mapping[str, int | float],
    rounds: int,
    highest: Ceilings,
    progress: Callable[[str], None],
    schedules: Sequence[ScheduleName],
    wanted: tuple[str, ...],
    deterministic: bool,
) -> Iterator[Measured]:
    spec = case.spec
    q, k, v, inputs, own = problem(case, params)
    schedules = [s for s in schedules if s not in UNFUSED or case.length <= SLOW_SCHEDULES_UP_TO]
    kernels = [compile(spec, kernel=schedule, device="cuda") for schedule in schedules]
    if wanted:
        parts = [[one.gradients(p, deterministic) for p in one.gradient_parts(wanted, deterministic)] for one in kernels]
        backwards = list(zip(parts, kernels, strict=True))
        subject = _backward(spec, backwards, (q, k, v), inputs, own, wanted, progress)
    else:
        subject = _forward(spec, kernels, (q, k, v), inputs, own, progress)
    errors = _errors(subject, progress)
    peaks = _peaks(subject.calls, progress)
    timings = measure({name: call for name, call in subject.calls.items() if name in peaks}, rounds)
    operations = operations_of_a_pair(spec, wanted) * allowed_pairs(spec, q, k, inputs, own)
    for name, timing in timings.items():
        tflops = operations / (timing.median * 1e9)
        yield Measured(
            case.title, spec.dtype.name, spec.head_dim, case.heads, case.masked, case.length, name, timing, tflops,
            tflops / highest.matmul, subject.bytes_moved / (timing.median * 1e9) / highest.copy, peaks[name], errors[name],
        )  # fmt: skip


def _forward(
    spec: AttentionSpec,
    kernels: Sequence[CompiledAttention],
    qkv: QKV,
    inputs: Tensors,
    params: Params,
    progress: Callable[[str], None],
) -> _Subject:
    q, _, v = qkv
    own, places = in_storage(spec, qkv)
    given = own[: 3 if spec.values is None else 2]
    calls: dict[str, Callable[[], object]] = {
        f"attngen {kernel.plan.keyword}": partial(_call, kernel, given, {**places, **inputs, **params}) for kernel in kernels
    }
    calls |= torch_peers(spec, *qkv) | flash_peers(spec, *qkv) | flex_peer(spec, *qkv, inputs, params, progress)
    truth = partial(torch_attention, spec, *qkv, inputs=inputs, params=params)
    output_bytes = q[..., :1].numel() * v.shape[3] * q.element_size()
    read = qkv[: len(given)]  # values that are a part of keys have no bytes of their own
    return _Subject(calls, lambda: truth()[0], _error, output_bytes + _bytes(*read, *inputs.values()))


def _backward(
    spec: AttentionSpec,
    kernels: Sequence[tuple[Sequence[CompiledBackward], CompiledAttention]],
    qkv: QKV,
    inputs: Tensors,
    params: Params,
    wanted: tuple[str, ...],
    progress: Callable[[str], None],
) -> _Subject:
    """Every candidate has the same tensors and loss. A forward is no part of a call."""
    given = arguments(spec, qkv, inputs, params).with_loss(spec)
    calls: dict[str, Callable[[], object]] = {
        f"attngen {' + '.join(one.plan.keyword for one in parts)}": kernel_call(parts, forward, given)
        for parts, forward in kernels
    }
    calls |= peer_calls(spec, given, params, wanted, progress)
    dout = given.tensors["dout"]
    tensors = {name: given.tensors[name] for name in ("q", "k", "v", *inputs)}
    truth = partial(torch_gradients, spec, tensors, params, dout, wanted)
    written = [tensors[name] for name in wanted if name in tensors]
    return _Subject(calls, truth, relative_error, _bytes(*tensors.values(), *written, dout, dout))  # twice: O is read too


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def problem(case: Case, params: Mapping[str, int | float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tensors, Params]:
    """(q, k, v, inputs, params) of a case; Q, K and V are randn."""
    spec = case.spec

    def randn(tensor: str, heads: int, length: int, size: int) -> torch.Tensor:
        element = getattr(torch, spec.dtypes[tensor].torch)
        return torch.randn(case.batch, heads, length, size, device="cuda").to(element)

    q, k = randn("q", case.q_heads, case.q_len, spec.head_dim), randn("k", case.kv_heads, case.length, spec.head_dim)
    v = spec.values_of(k, None if spec.values else randn("v", case.kv_heads, case.length, spec.head_dim_v))
    shape = Shape(case.batch, case.q_heads, case.kv_heads, case.q_len, case.length)
    inputs = {n: to_torch(a, "cuda") for n, a in sample_inputs(spec, shape).items()}
    return q, k, v, inputs, {p.name: params[p.name] for p in spec.params if p.name in params}


def _call(kernel: CompiledAttention, tensors: tuple[torch.Tensor, ...], named: dict[str, Any]) -> torch.Tensor:
    result = kernel(*tensors, **named)
    output = result[0] if isinstance(result, tuple) else result
    return output.unflatten(0, (-1, named["max_q_len"])).transpose(1, 2) if kernel.spec.kernel.is_packed else output


def _errors(subject: _Subject, progress: Callable[[str], None]) -> Mapping[str, float | None]:
    """The error of each call. None if the float64 scores of the oracle do not fit the GPU's memory."""
    try:
        truth = subject.truth()
        return {name: subject.error(call(), truth) for name, call in subject.calls.items()}
    except torch.OutOfMemoryError:
        progress("errors are left out: the float64 reference does not fit the memory of this GPU")
        return dict.fromkeys(subject.calls)
    finally:
        torch.cuda.empty_cache()


def _peaks(calls: Mapping[str, Callable[[], object]], progress: Callable[[str], None]) -> dict[str, int]:
    """The peak memory of each call in bytes. A call that runs out of memory is left out."""
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

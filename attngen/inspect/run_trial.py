"""One problem of a check, run by a kernel and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple, TypeVar

from attngen.api import CompiledAttention
from attngen.backward import CompiledBackward
from attngen.emit.emitter import emit
from attngen.inspect.backward import backward_inputs, run_backward, run_sequences
from attngen.inspect.known import FEW_DRAWS, Known
from attngen.inspect.trial import Trial
from attngen.plan import Plan
from attngen.plan.heads_in_l2 import HeadsInL2
from attngen.reference.compare import MOST_DRAWS, Comparison, Wrong, compare
from attngen.reference.compare_gradients import DRAWS, compare_gradients
from attngen.reference.problems import Array, Sample
from attngen.reference.stored import PAGE_SIZE, Arguments, apart, dense, of_sequences, stored, with_layout, with_wrong_lengths
from attngen.spec.dtypes import nans
from attngen.spec.gradient import QKV


class FewHeads(HeadsInL2):
    """Fewer heads numbered together than a call has: all but those of the last key/value head."""

    def __call__(self, sizes: Mapping[str, int]) -> int:
        heads, group = sizes["batch"] * sizes["kv_heads"], sizes["q_heads"] // sizes["kv_heads"]
        return max(heads - 1, 1) * group


class GradientErrors(NamedTuple):
    """The largest error of one gradient, and its bound."""

    error: float
    allowed: float


C = TypeVar("C", CompiledAttention, CompiledBackward)
Computed = Future[None]  # what a problem's results are compared with
Found = tuple[Comparison, float, Mapping[str, GradientErrors]]  # a problem's results; the float: seconds of the run


def run_trial(compiled: CompiledAttention | CompiledBackward, known: Known, computed: Computed, trial: Trial) -> Found:
    """The results of `trial` beside what is known of its problem, once that is `computed`: perhaps for a trial with other
    strides. Raises what running raises."""
    if isinstance(compiled, CompiledBackward):
        return (_backward_of_sequences if trial.setting.lengths else _backward)(compiled, known, computed, trial)
    return _forward(compiled, known, computed, trial)


def _backward(compiled: CompiledBackward, known: Known, computed: Computed, trial: Trial) -> Found:
    arrays = backward_inputs(compiled.spec, compiled.plan, known.poisoned, known.poisoned_loss, known.reference)
    start = perf_counter()
    gradients = run_backward(_on_device_of(compiled, trial), arrays, trial.params, trial.setting.apart, trial.setting.laid_out)
    done = perf_counter() - start
    computed.result()
    each = _compared_gradients(gradients, known, compiled.plan)
    worst = max(each.values(), key=lambda one: one.excess)
    wrong = tuple(tensor for one in each.values() for tensor in one.wrong)
    errors = {name: GradientErrors(one.error, one.allowed) for name, one in each.items()}
    return replace(worst, wrong=wrong), done, errors


def _backward_of_sequences(compiled: CompiledBackward, known: Known, computed: Computed, trial: Trial) -> Found:
    """Gradients of captured tensors, which are sums over all sequences, are computed and not compared."""
    spec, plan = compiled.spec, compiled.plan
    computed.result()
    knowns = [known.of_lengths[lengths] for lengths in trial.setting.lengths]
    given = [backward_inputs(spec, plan, one.sample, one.loss, one.reference) for one in knowns]
    captured = {name: array for name, array in known.sample.inputs.items() if name in given[0]}
    sequences = [{n: array[b] for n, array in one.items() if n not in captured} for b, one in enumerate(given)]
    start = perf_counter()
    found = run_sequences(_on_device_of(compiled, trial), sequences, captured, trial.params, trial.setting.wrong_lengths)
    done = perf_counter() - start
    compared: list[tuple[str, Comparison]] = []
    for b, (one, gradients) in enumerate(zip(knowns, found, strict=True)):
        of_one = _compared_gradients(gradients, one, plan, b)
        compared += [(name, replace(c, wrong=_of_sequence(b, c.wrong))) for name, c in of_one.items()]
    compared.sort(key=lambda named: named[1].excess)
    errors = {name: GradientErrors(c.error, c.allowed) for name, c in compared}  # the worst one is the last one
    wrong = tuple(tensor for _, c in compared for tensor in c.wrong)
    return replace(compared[-1][1], wrong=wrong), done, errors


def _compared_gradients(
    gradients: Mapping[str, Array], known: Known, plan: Plan, b: int | None = None
) -> Mapping[str, Comparison]:
    """The errors of all batches, or of sequence `b`, whose gradients these are."""
    for draws in (FEW_DRAWS, DRAWS):
        expected = known.gradients(plan, draws)
        found = compare_gradients(gradients, expected if b is None else expected.of_batch(b))
        if all(one.passed for one in found.values()):
            break
    return found


def _of_sequence(b: int, wrong: Sequence[Wrong]) -> tuple[Wrong, ...]:
    """The same, of which the first index is that of a sequence."""
    return tuple(replace(one, index=(b, *one.index[1:])) for one in wrong)


def _forward(compiled: CompiledAttention, known: Known, computed: Computed, trial: Trial) -> Found:
    start = perf_counter()
    results = _call(_on_device_of(compiled, trial), known.poisoned, trial)
    done = perf_counter() - start
    computed.result()
    if not trial.setting.lengths:
        return _compared(*results, known, compiled.plan), done, {}
    sequences = of_sequences(compiled.spec, [rows for rows, _ in trial.setting.lengths], *results)
    found = [
        _compared(*result, known.of_lengths[lengths], compiled.plan, b)
        for b, (lengths, result) in enumerate(zip(trial.setting.lengths, sequences, strict=True))
    ]
    worst = max(found, key=lambda one: one.excess)
    return replace(worst, wrong=tuple(tensor for one in found for tensor in one.wrong)), done, {}


def _compared(output: Array, lse: Array | None, known: Known, plan: Plan, b: int | None = None) -> Comparison:
    """The errors of all batches, or of sequence `b`, whose results these are."""
    for draws in (FEW_DRAWS, MOST_DRAWS):
        expected = known.truth(plan, draws)
        found = compare(output, lse, expected if b is None else expected.of_batch(b))
        if found.passed:
            return found
    return found if b is None else replace(found, wrong=_of_sequence(b, found.wrong))


def _on_device_of(compiled: C, trial: Trial) -> C:
    """The same kernel on an emulated device with the multiprocessors of `trial`; GPUs have theirs. If few heads are numbered
    together, its launches have another number of them."""
    if trial.setting.sections:
        plan = replace(compiled.plan, heads_in_l2=FewHeads(0, 0, 0))
        source = replace(emit(compiled.spec, plan), text=compiled.source.text)
        compiled = replace(compiled, plan=plan, kernel=compiled.device.compile(source))
    if not trial.setting.multiprocessors or compiled.device.name.startswith("cuda"):
        return compiled
    from attngen.device.emulated.device import EmulatedDevice

    assert isinstance(compiled.device, EmulatedDevice)
    return replace(compiled, device=replace(compiled.device, multiprocessors=trial.setting.multiprocessors))


def _call(compiled: CompiledAttention, problem: Sample, trial: Trial) -> tuple[Array, Array | None]:
    """O and lse as numpy storage arrays, wherever the kernel ran: dense, or with `lengths` in the spec's storage."""
    rows, keys = zip(*trial.setting.lengths, strict=True) if trial.setting.lengths else (None, None)
    arrays = stored(compiled.spec, problem, rows, keys, trial.setting.page_size or PAGE_SIZE)
    if trial.setting.wrong_lengths:
        arrays = with_wrong_lengths(compiled.spec, arrays)
    on_gpu = compiled.device.name.startswith("cuda")
    if on_gpu:
        from attngen.inspect.gpu_memory import to_gpu

        arrays = {name: array if isinstance(array, int) else to_gpu(array) for name, array in arrays.items()}
    else:
        spec = compiled.spec  # an element of O that no thread writes fails the comparison
        arrays["out"] = nans((*arrays["q"].shape[:-1], spec.head_dim_v), spec.dtypes["o"].numpy)
        if trial.setting.apart:
            arrays |= apart({name: arrays[name] for name in (*QKV, "out", *problem.inputs) if name in arrays})
        if trial.setting.laid_out:
            name, layout = trial.setting.laid_out
            arrays[name] = with_layout(arrays[name], layout)
    given: Arguments = {**arrays, **trial.params}
    result = compiled(**given)
    output, lse = result if compiled.spec.lse else (result, None)
    if on_gpu:
        from attngen.inspect.gpu_memory import from_gpu

        output, lse = from_gpu(output), None if lse is None else from_gpu(lse)
    return (output, lse) if trial.setting.lengths else dense(compiled.spec, problem, output, lse)

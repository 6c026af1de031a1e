"""flex_attention below its arguments: in eager mode, and as the higher-order operator that torch.compile traces.

Dynamo traces a score and a mask into graphs, and hands the tensors and numbers that they capture over as arguments, by what it
knows of torch's own operator `flex_attention`, whose arguments this one has. The operator consists of others: autograd and
compilers see `attngen::attention`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import index
from typing import Any

import torch
from torch import Tensor

from attngen.spec.dropout import RNG_STATE
from attngen.torch.block_mask import Function
from attngen.torch.check_indices import are_checked, check_indices
from attngen.torch.closures import Closure
from attngen.torch.description import Mode, check_mode
from attngen.torch.flex_spec import Described, Functions, prepare
from attngen.torch.front import Call, Front, Key
from attngen.torch.graphs import hint, stand_in
from attngen.torch.layout import padded
from attngen.torch.max_scores import max_scores
from attngen.torch.private import SYMBOLIC, HigherOrderOperator, outside_of_modes, tracing

NUMBERS = {"score": 5, "mask": 4}  # arguments of a traced function that are not captured


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    functions: Functions,
    captured: Sequence[Tensor],
    tables: Mapping[str, Tensor],
    block_size: tuple[int, int] | None,
    scale: float,
    mode: Mode,
    wants: tuple[bool, bool],
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, lse, largest scores) of a call; the last two have no element unless `wants` them. `captured` are the tensors of
    the closure as the call has them."""
    check_mode(mode)
    q, k, v = (_padded(t, query.shape[0]) for t in (query, key, value))
    sizes = {"batch": q.shape[0], "q_heads": q.shape[1], "kv_heads": k.shape[1], "q_len": q.shape[2], "kv_len": k.shape[2]}
    described = Described(q.dtype, index(q.shape[3]), index(v.shape[3]), wants[0], block_size, mode, dropout)
    if functions.closure.is_traced:
        with _outside_of_traces():
            stands = {n: stand_in(t) for n, t in tables.items()}
            hints = {n: hint(size) for n, size in sizes.items()}
            prepared = prepare(functions, described, stands, hints, torch.device(q.device.type))
    else:
        prepared = prepare(functions, described, tables, sizes, q.device)
    inputs = prepared.inputs(captured, tables, q.device, keeps_fp64=mode == "math")
    ints, floats = prepared.numbers(captured, scale)
    if are_checked() and not functions.closure.is_traced:
        check_indices(prepared.spec, prepared.reads, q, k, inputs, prepared.int_params(captured))
    lists: tuple[object, ...] = (inputs or None, ints or None, floats)
    tensors = (q, k, v, *inputs)
    known: Key = None if functions.closure.is_traced else (mode, prepared.text, *ints, *floats)
    result = _front.call(tensors, known, Call, (q, k, v, prepared.text, *lists), mode, None, True)
    output, lse = result[0], result[1] if wants[0] else result[0].new_empty((0,))
    largest = max_scores(q, k, prepared.text, inputs, ints, floats) if wants[1] else lse.new_empty((0,))
    if output.shape[3] != value.shape[3]:
        output = output[..., : index(value.shape[3])]
    return _as_query(output, query), lse, largest


def _padded(tensor: Tensor, batch: int) -> Tensor:
    """`tensor`, `padded`, of the query's batch."""
    tensor = padded(tensor)
    return tensor.expand(batch, -1, -1, -1) if tensor.shape[0] == 1 and batch != 1 else tensor


def _as_query(output: Tensor, query: Tensor) -> Tensor:
    """`output` with its dimensions in the order of the query's memory, the last one innermost."""
    strides = query.stride()
    wanted, step = [0, 0, 0, 1], output.shape[3]
    order = sorted(range(3), key=lambda d: (strides[d], -d))  # innermost first
    for dim in order:
        wanted[dim] = step
        step = step * output.shape[dim]
    if output.stride() == tuple(wanted):
        return output
    if all(n == 1 or a == b for a, b, n in zip(output.stride(), wanted, output.shape, strict=True)):
        outermost_first = [*reversed(order), 3]
        sizes = [output.shape[d] for d in outermost_first]
        in_memory = output.permute(outermost_first).flatten().view(sizes)  # strides of dimensions of size 1 are the usual ones
        return in_memory.permute([outermost_first.index(d) for d in range(4)])
    return torch.empty_strided(output.shape, wanted, dtype=output.dtype, device=output.device).copy_(output)


class FlexOperator(HigherOrderOperator):
    """torch's higher-order operator `flex_attention` with attngen's kernels below it."""

    def __init__(self) -> None:
        super().__init__("attngen_flex_attention")
        self._cacheable = True  # its arguments say all, see `sources`; the argument of this name is not in every release
        self.__name__ = "flex_attention"  # by which Dynamo knows how to trace the functions
        self.__module__, self.__qualname__ = __name__, "flex_operator"  # where torch's cache of graphs finds it

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Function | torch.fx.GraphModule,
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: Mapping[str, Any],
        score_mod_other_buffers: tuple[Tensor, ...] = (),
        mask_mod_other_buffers: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        block_size, partial, full, sinks, state, mask_mod = block_mask
        tables = {"partial_blocks": partial, "full_blocks": full, "sinks": sinks, RNG_STATE.name: state}
        call = (
            {n: t for n, t in tables.items() if t is not None},
            None if block_size is None else tuple(block_size),
            scale,
            kernel_options["mode"],
            tuple(kernel_options["wants"]),
            kernel_options["dropout"],
        )
        if not isinstance(score_mod, torch.fx.GraphModule):  # a break of the graph, as Dynamo cannot trace one of the functions
            outside: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.compiler.disable(attend_untraced)
            return outside(query, key, value, score_mod, mask_mod, call)
        captured = (*score_mod_other_buffers, *mask_mod_other_buffers)
        functions = _traced_functions(score_mod, score_mod_other_buffers, mask_mod, mask_mod_other_buffers)
        return attend(query, key, value, functions, captured, *call)


def attend_untraced(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Function | None, mask_mod: Function | None, call: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend` of functions of Python; None: there is none."""
    closure = Closure()
    functions = Functions(score_mod, mask_mod, closure, closure.key_of(score_mod, mask_mod))
    return attend(query, key, value, functions, [tensor for _, tensor in closure.tensors], *call)


def _traced_functions(
    score: torch.fx.GraphModule, score_buffers: tuple[Tensor, ...], mask: torch.fx.GraphModule, mask_buffers: tuple[Tensor, ...]
) -> Functions:
    """Functions that Dynamo traced. Stand-ins take the place of what they capture, which are tensors of a trace."""
    with _outside_of_traces():
        stands = [tuple(map(stand_in, buffers)) for buffers in (score_buffers, mask_buffers)]
    closure = Closure(is_traced=True)
    for function, own, given, kind in ((score, stands[0], score_buffers, "score"), (mask, stands[1], mask_buffers, "mask")):
        for title, stand, buffer in zip(_names_of(function, NUMBERS[kind]), own, given, strict=False):
            closure.shapes[closure.add(title, stand)] = getattr(buffer, "shape", ())
    closure.symbols.update(n for n, b in enumerate((*score_buffers, *mask_buffers)) if not isinstance(b, torch.Tensor))
    return Functions(_with_buffers(score, stands[0]), _with_buffers(mask, stands[1]), closure, None)


def _names_of(function: torch.fx.GraphModule, numbers: int) -> list[str]:
    names = [node.name for node in function.graph.nodes if node.op == "placeholder"][numbers:]
    return [name.removeprefix("l_").removesuffix("_") for name in names]


def _with_buffers(function: torch.fx.GraphModule, stands: tuple[Tensor, ...]) -> Function:
    of_tensors = _for_tensors(function)

    def run(*numbers: Tensor) -> Tensor:
        return of_tensors(*numbers, *stands)

    run.__name__ = "the function"
    return run


def _for_tensors(function: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph of Dynamo's in which what it does with symbols is done with tensors, which stand for them."""
    if not any(_instead(node) for node in function.graph.nodes):
        return function
    copied = torch.fx.GraphModule(function, copy.deepcopy(function.graph))
    for node in copied.graph.nodes:
        instead = _instead(node)
        if instead is not None:
            node.op, node.target = "call_function", instead
    copied.recompile()
    return copied


def _instead(node: torch.fx.Node) -> Callable[..., object] | None:
    """What a node calls if its operands are tensors; None for what it calls already."""
    if node.op == "call_function" and node.target in _OF_SYMBOLS:
        return _OF_SYMBOLS[node.target]
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    if name == "item":  # a float that may change: Dynamo captures it as a tensor
        return torch.detach
    others = (*node.args[1:], *node.kwargs.values())
    return _OF_NUMBERS.get(name) if any(isinstance(other, torch.fx.Node) for other in others) else None


def _clamped(input: Tensor, min: object = None, max: object = None) -> Tensor:
    """torch.clamp, which reads a tensor beside a number on the host."""
    ends = (None if end is None else torch.as_tensor(end) for end in (min, max))
    return torch.clamp(input, *ends)


def _full_like(input: Tensor, fill_value: object, *, dtype: torch.dtype | None = None, **others: object) -> Tensor:
    """torch.full_like, which reads a tensor on the host."""
    return torch.as_tensor(fill_value).to(dtype or input.dtype).expand(input.shape)


_OF_NUMBERS: dict[str, Callable[..., Tensor]] = {"clamp": _clamped, "clip": _clamped, "full_like": _full_like}
_OF_SYMBOLS: dict[Any, Callable[..., object]] = {
    torch.sym_sum: sum,
    torch.sym_max: lambda a, b: torch.maximum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b))),
    torch.sym_min: lambda a, b: torch.minimum(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b))),
    torch.sym_not: torch.logical_not,
    torch.sym_float: torch.Tensor.double,
    torch.sym_int: torch.Tensor.long,
    **SYMBOLIC,
}


def _outside_of_traces() -> ExitStack:
    stack = ExitStack()
    stack.enter_context(tracing(None))
    stack.enter_context(outside_of_modes())
    return stack


flex_operator = FlexOperator()
_front = Front()

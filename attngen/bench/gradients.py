"""The backward of a case beside those of torch's backends and FlexAttention's, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from attngen.api import CompiledAttention
from attngen.backward import CompiledBackward
from attngen.bench.arguments import Arguments, Tensors
from attngen.bench.peers import first_line, flash_peers, flex_peer, torch_peers
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import gradient_argument

Call = Callable[[], Tensors]
Progress = Callable[[str], None]


def kernel_call(parts: Sequence[CompiledBackward], forward: CompiledAttention, given: Arguments) -> Call:
    """A call of attngen's backward of `forward` alone, as torch's operator makes it: without autograd, which has no gradients
    of params. `parts` compute its gradients one after the other.

    `given` has a loss. What is read of the forward's results is computed now. Raises PlanRefusal.
    """
    calls = [
        partial(_renamed, (given.with_results(forward) if one.plan.saved else given).call(one), one.plan.wanted)
        for one in parts
    ]
    return lambda: {name: gradient for call in calls for name, gradient in call().items()}


def _renamed(call: Call, wanted: tuple[str, ...]) -> Tensors:
    found = call()
    return {name: found[gradient_argument(name)] for name in wanted}


def peer_calls(
    spec: AttentionSpec, given: Arguments, params: Mapping[str, int | float], wanted: tuple[str, ...], progress: Progress
) -> dict[str, Call]:
    """The backward alone of each peer that supports the spec, for the same gradient of O: the forward has run, and is not part
    of a call. No peer has gradients of params."""
    of_params = [name for name in wanted if name not in given.tensors]
    if of_params:
        progress(f"attngen alone: autograd has no gradients of numbers ({', '.join(of_params)})")
        return {}
    leaves = {name: given.tensors[name].detach().clone().requires_grad_() for name in wanted}
    q, k, v = (leaves.get(name, given.tensors[name]) for name in ("q", "k", "v"))
    inputs = {i.name: leaves.get(i.name, given.tensors[i.name]) for i in spec.inputs}
    with torch.enable_grad():
        forwards = torch_peers(spec, q, k, v) | flash_peers(spec, q, k, v)
        forwards |= flex_peer(spec, q, k, v, inputs, params, progress)
    found = {}
    for title, forward in forwards.items():
        try:
            found[title] = _autograd_call(forward, leaves, given.tensors["dout"])
        except Exception as error:  # whatever these libraries raise for a backward that they do not support
            progress(f"{title} has no backward of this: {first_line(error)}")
    return found


def _autograd_call(forward: Callable[[], torch.Tensor], leaves: Tensors, dout: torch.Tensor) -> Call:
    """The backward of one call of `forward`, which has run once."""
    with torch.enable_grad():
        output = forward()

    def call() -> Tensors:
        found = torch.autograd.grad(output, tuple(leaves.values()), dout, retain_graph=True)
        return dict(zip(leaves, found, strict=True))

    call()
    return call


def relative_error(found: Tensors, truth: Tensors) -> float:
    """The largest error of a gradient relative to its largest element, of all gradients."""
    return max(_relative(found[name].double(), exact) for name, exact in truth.items())


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    error, largest = float((found - exact).abs().max()), float(exact.abs().max())
    return error / largest if largest else error

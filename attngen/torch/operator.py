"""The operator `attngen::attention`: every attention of this package, in every mode of torch.

    attention(Tensor q, Tensor k, Tensor v, str spec, Tensor[]? inputs=None, SymInt[]? ints=None, float[]? floats=None)
        -> (Tensor o, Tensor lse)

`spec` is an `.attn` text with one attention, so that an exported graph says by itself what it computes; `inputs` are its
captured tensors, `ints` and `floats` its params of either type, all in the order of their declaration. O lies in memory as q
does ([batch, heads, length, size] or [batch, length, heads, size]); lse has no element where the spec does not say `output
lse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import torch

from attngen.api import CompiledAttention, compile, preload
from attngen.device.arrays import ArgumentError, ArrayView, view
from attngen.language import load_text
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Type

Tensor = Any  # torch.Tensor; torch is imported without its types

SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, str spec, Tensor[]? inputs=None, SymInt[]? ints=None, float[]? floats=None) "
    "-> (Tensor, Tensor)"
)
MOST_SIGNATURES = 4096  # call signatures remembered by one kernel: a length that was seen before costs no checks


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    inputs: Sequence[Tensor] | None = None,
    ints: Sequence[int] | None = None,
    floats: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    found = _runtimes.get((spec, q.device)) or runtime(spec, q.device)
    return found(q, k, v, inputs or (), ints or (), floats or ())


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str,
    inputs: Sequence[Tensor] | None = None,
    ints: Sequence[int] | None = None,
    floats: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes and strides alone."""
    refuse_grad(q, k, v, inputs or ())
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ArgumentError(f"`{name}` has {tensor.dim()} dimensions; expected [batch, heads, length, head size]")
    return output_like(q, v.shape[3]), lse_like(q, parsed(spec).lse)


_LIBRARY = torch.library.Library("attngen", "FRAGMENT")
_LIBRARY.define(SCHEMA)
for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("attention", _run, _key)
_LIBRARY.impl("attention", torch.library.fallthrough_kernel, "Autograd")  # `_run` and `_fake` refuse what requires grad
torch.library.register_fake("attngen::attention", _fake, lib=_LIBRARY)

attention_operator = torch.ops.attngen.attention.default

preload()  # whoever imports this will call it: the first call should not pay for what all calls need
if torch.cuda.is_available():
    import cuda.core  # noqa: F401


def output_like(q: Tensor, head_dim_v: Any) -> Tensor:
    """An uninitialized O [batch, q_heads, q_len, head_dim_v] that lies in memory as q does."""
    batch, heads, length, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, length, heads, head_dim_v)).transpose(1, 2)
    return q.new_empty((batch, heads, length, head_dim_v))


def lse_like(q: Tensor, wanted: bool) -> Tensor:
    """An uninitialized lse [batch, q_heads, q_len] in fp32, or a tensor without elements."""
    return q.new_empty(q.shape[:3] if wanted else (0,), dtype=torch.float32)


@cache
def no_lse(device: Any) -> Tensor:
    """The one tensor without elements that stands for an lse that nobody asked for: making another costs a microsecond."""
    return torch.empty((0,), dtype=torch.float32, device=device)


def refuse_grad(q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor]) -> None:
    """Raise ArgumentError where a gradient would be lost."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in (("q", q), ("k", k), ("v", v), *((f"inputs[{i}]", t) for i, t in enumerate(inputs))):
        if tensor.requires_grad:
            raise ArgumentError(
                f"`{name}` requires grad, and there is no backward kernel yet; call under torch.no_grad(), or pass "
                f"{name}.detach()"
            )


@lru_cache(maxsize=4096)
def parsed(text: str) -> AttentionSpec:
    """The one attention of `text`. Raises DiagnosticError, ArgumentError."""
    specs = load_text(text, "<spec>")
    if len(specs) != 1:
        raise ArgumentError(f"the operator takes one attention, not {len(specs)}")
    return specs[0]


_runtimes: dict[tuple[str, Any], Runtime] = {}
_lock = Lock()


def runtime(text: str, device: Any) -> Runtime:
    """The kernel of a spec's text on a device, compiled when first asked for."""
    found = _runtimes.get((text, device))
    if found is None:
        with _lock:
            found = _runtimes.get((text, device))
            if found is None:
                place = f"cuda:{device.index or 0}" if device.type == "cuda" else "emulated"
                kind = OnGpu if device.type == "cuda" else Emulated
                found = _runtimes[text, device] = kind(compile(parsed(text), device=place))
    return found


class Runtime:
    """One compiled spec, called with tensors."""

    def __init__(self, compiled: CompiledAttention) -> None:
        self.compiled = compiled
        spec = compiled.spec
        self.input_names = tuple(i.name for i in spec.inputs)
        self.int_names = tuple(p.name for p in spec.params if p.type is Type.INT)
        self.float_names = tuple(p.name for p in spec.params if p.type is Type.FLOAT)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def arrays(self, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor]) -> dict[str, ArrayView]:
        """What the kernel's tensors are in this call, outputs freshly allocated. Raises ArgumentError."""
        self._check_counts(inputs, self.input_names, "inputs")
        named = zip(self.input_names, inputs, strict=True)
        arrays = {"Q": view(q, "q"), "K": view(k, "k"), "V": view(v, "v"), **{n: view(t, n) for n, t in named}}
        for array in arrays.values():
            if array.name in ("q", "k", "v") and len(array.shape) != 4:
                raise ArgumentError(
                    f"`{array.name}` has {len(array.shape)} dimensions; expected [batch, heads, length, head size]"
                )
        arrays["O"] = view(output_like(q, v.shape[3]), "out")
        if self.compiled.spec.lse:
            arrays["lse"] = view(lse_like(q, True), "lse")
        return arrays

    def params(self, ints: Sequence[int], floats: Sequence[float]) -> dict[str, int | float]:
        """Every param's value by name. Raises ArgumentError."""
        self._check_counts(ints, self.int_names, "ints")
        self._check_counts(floats, self.float_names, "floats")
        return dict(zip(self.int_names, ints, strict=True)) | dict(zip(self.float_names, floats, strict=True))

    def _check_counts(self, given: Sequence[Any], names: tuple[str, ...], what: str) -> None:
        if len(given) != len(names):
            raise ArgumentError(f"{len(given)} {what} were given; this attention takes {len(names)}: {', '.join(names)}")


class Emulated(Runtime):
    """On the CPU, as the emulated device runs it."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        refuse_grad(q, k, v, inputs)
        arrays = self.arrays(q, k, v, inputs)
        bound = self.compiled.bind(arrays, self.params(ints, floats))
        if bound.launches:
            self.compiled.kernel.launch(bound.launches, bound.memory)
        return arrays["O"].owner, arrays["lse"].owner if "lse" in arrays else no_lse(q.device)


class OnGpu(Runtime):
    """On a GPU. What a call is checked for and made of is remembered by its signature: shapes, strides, types, params."""

    def __init__(self, compiled: CompiledAttention) -> None:
        super().__init__(compiled)
        alignment = max(t.alignment for t in compiled.source.tensors if t.name in ("Q", "K", "V"))
        self._misaligned = max(alignment - 1, 0)  # the bits of an address that must not be set
        self._calls: dict[tuple[Any, ...], _Call] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        grad = (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
        signature = (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype, k.device, v.device, grad,
        )  # fmt: skip
        if inputs:
            signature += tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in inputs)
        if ints or floats:
            signature += (*ints, *map(float, floats))
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
        call = self._calls.get(signature)
        if call is None or (addresses[0] | addresses[1] | addresses[2]) & self._misaligned:
            refuse_grad(q, k, v, inputs)
            call = self._remember(signature, q, k, v, inputs, ints, floats)  # names what is wrong with an address
        return call(q, addresses, inputs)

    def _remember(
        self,
        signature: tuple[Any, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: Sequence[Tensor],
        ints: Sequence[int],
        floats: Sequence[float],
    ) -> _Call:
        call = _Call(self, q, k, v, inputs, self.params(ints, floats))
        while len(self._calls) >= MOST_SIGNATURES:
            self._calls.pop(next(iter(self._calls)), None)
        self._calls[signature] = call
        return call


class _Call:
    """The launches of one signature."""

    def __init__(
        self, owner: OnGpu, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], params: dict[str, int | float]
    ) -> None:
        compiled = owner.compiled
        arrays = owner.arrays(q, k, v, inputs)
        bound = compiled.bind(arrays, params)
        o = arrays["O"].owner
        workspaces = [arrays[t.name].owner for t in compiled.source.tensors if t.role == "workspace"]
        outputs = [o, *([arrays["lse"].owner] if compiled.spec.lse else [])]
        names = ["O", *(["lse"] if compiled.spec.lse else [])]
        names += [t.name for t in compiled.source.tensors if t.role == "workspace"]
        self._shape, self._strides = tuple(o.shape), tuple(o.stride())
        self._others = tuple((tuple(t.shape), t.dtype) for t in (*outputs[1:], *workspaces))
        self._no_lse = None if compiled.spec.lse else no_lse(q.device)
        self._device = q.device
        self._index: int = q.device.index
        self._repeat = None
        if bound.launches:
            order = ("Q", "K", "V", *names, *owner.input_names)
            self._repeat = compiled.kernel.repeat(bound.launches, order)  # type: ignore[attr-defined]

    def __call__(self, q: Tensor, addresses: list[int], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        o = q.new_empty_strided(self._shape, self._strides)
        addresses.append(o.data_ptr())
        lse = self._no_lse
        if self._others:
            made = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._others]
            addresses += [t.data_ptr() for t in made]
            lse = made[0] if lse is None else lse
        if inputs:
            addresses += [t.data_ptr() for t in inputs]
        if self._repeat is not None:
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            if torch._C._cuda_getDevice() == self._index:
                self._repeat(addresses, stream)
            else:
                with torch.cuda.device(self._index):
                    self._repeat(addresses, stream)
        return o, lse

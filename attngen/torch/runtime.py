"""Kernels called with tensors, as the operator calls them: allocation, checks remembered by signature, launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import torch
from torch.autograd import forward_ad

from attngen.api import CompiledAttention, compile_later
from attngen.device.arrays import ArgumentError, ArrayView, dimensions, view
from attngen.device.binding import Apart
from attngen.device.choose import warn_emulated
from attngen.language import load_text
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Type

Tensor = Any  # torch.Tensor; torch is imported without its types
MOST_SIGNATURES = 4096  # call signatures remembered by one kernel: a length that was seen before costs no checks


def output_like(q: Tensor, head_dim_v: Any) -> Tensor:
    """An uninitialized O [batch, q_heads, q_len, head_dim_v] with the memory layout of q."""
    batch, heads, length, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((batch, length, heads, head_dim_v)).transpose(1, 2)
    return q.new_empty((batch, heads, length, head_dim_v))


def lse_like(q: Tensor, wanted: bool) -> Tensor:
    """An uninitialized lse [batch, q_heads, q_len] in fp32, or a tensor without elements."""
    return q.new_empty(q.shape[:3] if wanted else (0,), dtype=torch.float32)


@cache
def no_lse(device: Any) -> Tensor:
    """The empty tensor that is returned if the spec has no lse. There is one per device: another costs a microsecond."""
    return torch.empty((0,), dtype=torch.float32, device=device)


def refuse_grad(q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor] | None, spec: AttentionSpec | str) -> None:
    """Raise ArgumentError if a derivative would be lost. `inputs` are those of the spec, or of its text."""
    forward = forward_ad._current_level >= 0
    if not forward and not torch.is_grad_enabled():
        return
    for name, tensor in (("q", q), ("k", k), ("v", v), *named_inputs(spec, inputs)):
        if forward and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ArgumentError(f"`{name}` has a tangent, and attention has no forward-mode derivative; pass its primal alone")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"`{name}` requires grad, and there is no backward kernel yet; call under torch.no_grad(), or pass "
                f"{name}.detach()"
            )


def named_inputs(spec: AttentionSpec | str, inputs: Sequence[Tensor] | None) -> list[tuple[str, Tensor]]:
    """The inputs of a call of the spec, or of its text, with their names, as many as there are."""
    if not inputs:
        return []
    known = (parsed(spec) if isinstance(spec, str) else spec).inputs
    return [(declared.name, tensor) for declared, tensor in zip(known, inputs, strict=False)]


@lru_cache(maxsize=4096)
def parsed(text: str) -> AttentionSpec:
    """The one attention of `text`. Raises DiagnosticError, ArgumentError."""
    specs = load_text(text, "<spec>")
    if len(specs) != 1:
        raise ArgumentError(f"the operator takes one attention, not {len(specs)}")
    return specs[0]


runtimes: dict[tuple[str, Any], Emulated | OnGpu] = {}
_lock = Lock()


def runtime(text: str, device: Any) -> Emulated | OnGpu:
    """The kernel of a spec's text on a device: planned on first use, and compiled by the first call that fits it."""
    found = runtimes.get((text, device))
    if found is None:
        with _lock:
            found = runtimes.get((text, device))
            if found is None:
                if device.type == "cuda":
                    found = OnGpu(compile_later(parsed(text), f"cuda:{device.index or 0}"))
                else:
                    warn_emulated(
                        "attngen's attention on tensors of the CPU",
                        "Move the tensors to a GPU; torch's own attention is torch.nn.functional.scaled_dot_product_attention.",
                    )
                    found = Emulated(compile_later(parsed(text), "emulated"))
                runtimes[text, device] = found
    return found


_counters: dict[tuple[int, int], Tensor] = {}  # by device and stream


def counter_of(device: Any, stream: int) -> Tensor:
    """A zero in the device's memory for the launches on a stream, each of which leaves it zero. A graph that is being captured
    gets one of its own, which the graph sets to zero: it may be replayed on any stream."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    found = _counters.get((device.index, stream))
    if found is None:
        with _lock:
            found = _counters.get((device.index, stream))
            if found is None:
                found = torch.zeros(1, dtype=torch.int32, device=device)
                torch.cuda.current_stream(device).synchronize()  # `stream` may be another one
                _counters[device.index, stream] = found
    return found


class Runtime:
    """One compiled spec. Subclasses are called with tensors and return (O, lse), written to `out` and `lse` if these are given,
    on the driver's `stream` (the current one by default)."""

    def __init__(self, compiled: CompiledAttention) -> None:
        self.compiled = compiled
        spec = compiled.spec
        self.input_names = tuple(i.name for i in spec.inputs)
        self.int_names = tuple(p.name for p in spec.params if p.type is Type.INT)
        self.float_names = tuple(p.name for p in spec.params if p.type is Type.FLOAT)

    def arrays(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], out: Tensor | None, lse: Tensor | None
    ) -> dict[str, ArrayView]:
        """The kernel's tensors in this call; missing outputs are allocated. Raises ArgumentError."""
        self._check_counts(inputs, self.input_names, "inputs")
        named = zip(self.input_names, inputs, strict=True)
        arrays = {"Q": view(q, "q"), "K": view(k, "k"), "V": view(v, "v"), **{n: view(t, n) for n, t in named}}
        for array in arrays.values():
            if array.name in ("q", "k", "v") and len(array.shape) != 4:
                raise ArgumentError(
                    f"`{array.name}` has {dimensions(len(array.shape))}; expected [batch, heads, length, head size]"
                )
        arrays["O"] = view(output_like(q, v.shape[3]) if out is None else out, "out")
        if self.compiled.spec.lse:
            arrays["lse"] = view(lse_like(q, True) if lse is None else lse, "lse")
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
    """On the CPU, by the emulated device."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: Sequence[Tensor],
        ints: Sequence[int],
        floats: Sequence[float],
        out: Tensor | None = None,
        lse: Tensor | None = None,
        stream: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        refuse_grad(q, k, v, inputs, self.compiled.spec)
        arrays = self.arrays(q, k, v, inputs, out, lse)
        bound = self.compiled.bind(arrays, self.params(ints, floats))
        if out is not None or lse is not None:
            Apart(list(arrays.values())).check([array.pointer for array in arrays.values()])
        if bound.launches:
            self.compiled.kernel.launch(bound.launches, bound.memory)
        return arrays["O"].owner, arrays["lse"].owner if "lse" in arrays else no_lse(q.device)


class OnGpu(Runtime):
    """On a GPU. Checks and launches are remembered by a call's signature: shapes, strides, types, params."""

    def __init__(self, compiled: CompiledAttention) -> None:
        super().__init__(compiled)
        self.calls = Remembered()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: Sequence[Tensor],
        ints: Sequence[int],
        floats: Sequence[float],
        out: Tensor | None = None,
        lse: Tensor | None = None,
        stream: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        key = self._key(q, k, v, inputs, ints, floats)
        if out is not None:
            key += (out.shape, out.stride(), out.dtype, out.device, out.requires_grad)
        if lse is not None:
            key += ("lse", lse.shape, lse.stride(), lse.dtype, lse.device, lse.requires_grad)
        call = self.calls.get(key)
        result = call(q, k, v, inputs, out, lse, stream) if call is not None else None
        if result is None:
            refuse_grad(q, k, v, inputs, self.compiled.spec)
            params = self.params(ints, floats)
            given = out is not None or lse is not None
            call = Call(self, self.arrays(q, k, v, inputs, out, lse), params, given)  # makes all checks
            self.calls[key] = call
            result = call(q, k, v, inputs, out, lse, stream, checked=True)
            assert result is not None
        return result

    def made(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
    ) -> Call | None:
        """The remembered call with this signature."""
        return self.calls.get(self._key(q, k, v, inputs, ints, floats))

    @staticmethod
    def _key(
        q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
    ) -> tuple[Any, ...]:
        said = (*ints, *map(float, floats)) if ints or floats else None
        return signature(said, q, k, v, inputs)


def signature(said: Any, q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a call's checks and launches depend on, except addresses; `said` is the part that is not in the tensors."""
    key = (
        said, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device,
    )  # fmt: skip
    for t in inputs:
        key += (t.shape, t.stride(), t.dtype, t.device)  # type: ignore[assignment]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, *inputs)):
        key += (True,)  # type: ignore[assignment]
    return key


class Remembered(dict[tuple[Any, ...], "Call"]):
    """Calls by their signature; the oldest are dropped."""

    def __setitem__(self, key: tuple[Any, ...], call: Call) -> None:
        while len(self) >= MOST_SIGNATURES:
            self.pop(next(iter(self)), None)
        super().__setitem__(key, call)


class Call:
    """The launches of one signature."""

    def __init__(self, owner: OnGpu, arrays: dict[str, ArrayView], params: dict[str, int | float], given: bool) -> None:
        """`given`: whether the caller gives an output."""
        compiled = owner.compiled.at(arrays)
        bound = compiled.bind(arrays, params)
        q, o = arrays["Q"].owner, arrays["O"].owner
        names = [*(["lse"] if compiled.spec.lse else []), *(t.name for t in compiled.source.tensors if t.role == "workspace")]
        alignment = max(t.alignment for t in compiled.source.tensors if t.name in ("Q", "K", "V"))
        self._misaligned = max(alignment - 1, 0)  # the bits of an address that must not be set
        self._shape, self._strides = tuple(o.shape), tuple(o.stride())
        self._counted = any(t.role == "counter" for t in compiled.source.tensors)
        self._others = tuple((tuple(arrays[n].owner.shape), arrays[n].owner.dtype) for n in names)
        self._no_lse = None if compiled.spec.lse else no_lse(q.device)
        self._device = q.device
        self._index: int = q.device.index
        order = ("Q", "K", "V", "O", *names, *owner.input_names)
        self._apart = Apart([arrays[n] for n in order]) if given else None
        order += tuple(t.name for t in compiled.source.tensors if t.role == "counter")
        self._repeat = None
        if bound.launches:
            self._repeat = compiled.kernel.repeat(bound.launches, order)  # type: ignore[attr-defined]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: Sequence[Tensor],
        out: Tensor | None = None,
        lse: Tensor | None = None,
        stream: int | None = None,
        *,
        checked: bool = False,
    ) -> tuple[Tensor, Tensor] | None:
        """(O, lse), or None if an address is not aligned as the kernel's copies require and was not `checked`. Raises
        ArgumentError if an output shares memory with an input."""
        if out is None:
            out = q.new_empty_strided(self._shape, self._strides)
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()]
        if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & self._misaligned and not checked:
            return None
        if self._others:
            made = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._others]
            if lse is not None:
                made[0] = lse
            addresses += [t.data_ptr() for t in made]
            lse = made[0] if self._no_lse is None else None
        for t in inputs:
            addresses.append(t.data_ptr())
        if self._apart is not None:
            self._apart.check(addresses)
        if self._repeat is not None:
            if stream is None:
                stream = torch._C._cuda_getCurrentRawStream(self._index)
            if self._counted:
                counter = counter_of(self._device, stream)
                addresses.append(counter.data_ptr())
            if torch._C._cuda_getDevice() == self._index:
                self._repeat(addresses, stream)
            else:
                with torch.cuda.device(self._index):
                    self._repeat(addresses, stream)
        return out, self._no_lse if lse is None else lse

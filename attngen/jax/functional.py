"""`attention`, the function of JAX arrays: its checks when JAX traces it, and its derivative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from os import PathLike

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from attngen.api import check_schedule, load
from attngen.device.arrays import CPU, ArgumentError, ArgumentTypeError, ArrayView, Location, contiguous_strides
from attngen.device.binding import sizes_of
from attngen.device.params import declared_params, input_names, named_arguments
from attngen.device.protocol import DeviceError
from attngen.device.select import warn_emulated
from attngen.emit.program import Program, evaluate
from attngen.jax.call import ROWS, Call, compiled_of, device_of, run
from attngen.jax.manual_axes import manual_axes, varying, varying_alike
from attngen.jax.xla import handler
from attngen.plan.facts import DETERMINISTIC
from attngen.spec.attention import AttentionSpec
from attngen.spec.check import check
from attngen.spec.dtypes import DTYPES
from attngen.spec.gradient import QKV, gradient_argument, is_constant_in, wanted_gradients
from attngen.spec.obligations import check_obligations
from attngen.spec.print_attn import to_text

TARGET, ATTRIBUTE = "attngen_attention", "call"
LAYOUTS = ("bhsd", "bshd")
PLACES = {"cpu": CPU, "gpu": Location("cuda")}  # by JAX's names of backends
BY_NAME = {dtype.torch: dtype for dtype in DTYPES.values()}  # numpy's names, which are torch's


def attention(
    q: jax.typing.ArrayLike,
    k: jax.typing.ArrayLike,
    v: jax.typing.ArrayLike,
    spec: AttentionSpec | str | PathLike[str],
    *,
    kernel: str | None = None,
    layout: str = "bhsd",
    deterministic: bool = DETERMINISTIC,
    **named: object,
) -> jax.Array | tuple[jax.Array, ...]:
    """O of a spec, or (O, lse) if it has `output lse`: an AttentionSpec, or the name of one, as `attngen.load` takes it.

    q [batch, q_heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads, kv_len, head_dim_v], of the
    spec's element types; O has q's axes and head_dim_v. With layout "bshd", as jax.nn.dot_product_attention has it, axes are
    [batch, length, heads, size]. lse is [batch, q_heads, q_len] in fp32. Captured inputs are arrays by name; params are numbers
    by name, known when JAX traces the call. `kernel` overrides the spec's own schedule.

    q, k, v and captured float inputs have gradients, of O and of lse; those are computed that JAX differentiates by. With
    `deterministic` they have the same bits in every run. Tables of a rotation and scales of V have none; gradients of floats
    that only the mask reads are zeros. There is no second derivative and no forward mode. `jax.vmap` makes one call for each
    element. Dropout, storages other than dense, and `values` are not supported.

    Raises, when JAX traces the call, ArgumentError that names the argument at fault, GradientError for an array without a
    gradient; DiagnosticError, PlanRefusal, DeviceError.
    """
    spec = load(spec) if isinstance(spec, (str, PathLike)) else spec
    if not isinstance(spec, AttentionSpec):
        raise ArgumentTypeError(f"`spec` is {spec!r}; expected an AttentionSpec, or the name of one")
    check(spec)
    _check_options(spec, kernel, layout)
    for param in spec.params:
        if isinstance(named.get(param.name), jax.core.Tracer):
            raise ArgumentTypeError(
                f"param `{param.name}` is a value that JAX traces; pass a number, make it static (static_argnums), or declare "
                "an input instead"
            )
    inputs, params = named_arguments(input_names(spec), declared_params(spec), named, {})
    arrays = {"q": q, "k": k, "v": v} | dict(zip(input_names(spec), inputs, strict=True))
    given = {name: _array(name, array) for name, array in arrays.items()}
    text, location = to_text(spec), _location()
    arch = compiled_of(text, device_of(location), kernel).plan.arch.name
    call = Call(text, arch, kernel, bool(deterministic), tuple(params.items()), layout, tuple(given))
    _register()
    results = _attend(call, *varying_alike(given.values()))
    return tuple(results) if spec.lse else results[0]


def _check_options(spec: AttentionSpec, kernel: str | None, layout: str) -> None:
    if kernel is not None:
        check_schedule("kernel", kernel)
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout is {layout!r}; expected {' or '.join(LAYOUTS)}")
    for what, wanted in (
        (f"storage {spec.kernel.storage}", spec.kernel.storage != "dense"),
        ("dropout", spec.dropout is not None),
        ("values that are a part of K", spec.values is not None),
    ):
        if wanted:
            raise ArgumentError(f"attngen.jax has no {what}; attngen.compile and attngen.torch do")


def _array(name: str, array: object) -> jax.Array:
    """An argument as an array of JAX. Raises ArgumentTypeError."""
    try:
        found = jnp.asarray(array)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"`{name}` is of type {type(array).__name__}; expected an array of JAX ({error})") from None
    if found.dtype.name not in BY_NAME:
        raise ArgumentTypeError(f"`{name}` has elements of {found.dtype.name}; expected one of {', '.join(BY_NAME)}")
    return found


def _location() -> Location:
    """Where JAX computes by default. Raises DeviceError for neither a CPU nor a GPU of NVIDIA."""
    backend = jax.default_backend()
    if backend not in PLACES:
        raise DeviceError(f"attngen.jax computes on the CPU and on NVIDIA's GPUs; jax.default_backend() is {backend!r}")
    if PLACES[backend] == CPU:
        warn_emulated("attngen.jax.attention, as JAX computes on the CPU", "With a GPU, install JAX with CUDA.")
    return PLACES[backend]


@cache
def _register() -> tuple[object, ...]:
    """Tells XLA the handlers of both platforms; the cache keeps them."""
    handlers = (handler(run, ATTRIBUTE, on_gpu=False), handler(run, ATTRIBUTE, on_gpu=True))
    for platform, one in zip(("cpu", "CUDA"), handlers, strict=True):
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(one), platform=platform)
    return handlers


def _custom_call(call: Call, arrays: Sequence[jax.Array], results: Mapping[str, jax.ShapeDtypeStruct]) -> Sequence[jax.Array]:
    named = replace(call, outputs=tuple(results))
    arrays = varying_alike(arrays)
    made: Sequence[jax.Array] = jax.ffi.ffi_call(TARGET, tuple(results.values()), vmap_method="sequential")(
        *arrays, **{ATTRIBUTE: named.text()}
    )
    return [varying(array, manual_axes(arrays)) for array in made]


def _forward(call: Call, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """The results of the forward by name. Raises ArgumentError for arrays that do not fit."""
    location = _location()
    compiled = call.compiled(device_of(location))
    program = (compiled if call.does == "forward" else compiled.saving()).source
    views = {name: call.view(name, _described(array, location)) for name, array in zip(call.inputs, arrays, strict=True)}
    sizes = sizes_of(program, compiled.device, views)
    check_obligations(compiled.spec, sizes, dict(call.params))
    results = _results(program, sizes, call.layout)
    return dict(zip(results, _custom_call(call, arrays, results), strict=True))


def _described(array: jax.Array, location: Location) -> ArrayView:
    """An array that JAX traces, without its memory."""
    shape = tuple(array.shape)
    return ArrayView("", 0, shape, contiguous_strides(shape), BY_NAME[array.dtype.name], location, array)


def _results(program: Program, sizes: Mapping[str, int], layout: str) -> dict[str, jax.ShapeDtypeStruct]:
    found = {}
    for tensor in program.of_role("output"):
        shape = tuple(evaluate(axis.size, sizes) for axis in tensor.axes)
        if layout == "bshd" and tensor.argument in ROWS:
            shape = (shape[0], shape[2], shape[1], shape[3])
        found[tensor.argument] = jax.ShapeDtypeStruct(shape, DTYPES[tensor.dtype].torch)
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """(O,) or (O, lse)."""
    return tuple(_forward(call, arrays).values())


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """What a forward tells the backward beside arrays: the gradients to compute, and the names of the forward's results."""

    names: tuple[str, ...]
    saved: tuple[str, ...]


Kept = tuple[list[jax.Array], list[jax.Array], Wanted]  # arrays of the call, results of its forward


def _attend_forward(call: Call, *primals: jax.custom_derivatives.CustomVJPPrimal) -> tuple[tuple[jax.Array, ...], Kept]:
    """The results, and what the backward reads. Raises GradientError for an array that has no gradient."""
    arrays = [primal.value for primal in primals]
    perturbed = [name for name, primal in zip(call.inputs, primals, strict=True) if primal.perturbed]
    spec = call.compiled(device_of(_location())).spec
    wanted = tuple(name for name in perturbed if name in QKV or not is_constant_in(spec, name))
    if wanted:
        wanted_gradients(spec, wanted)
    saving = _forward(replace(call, does="saving"), arrays)
    results = tuple(saving[name] for name in (("out", "lse") if spec.lse else ("out",)))
    return results, (arrays, list(saving.values()), Wanted(wanted, tuple(saving)))


def _attend_backward(call: Call, kept: Kept, cotangents: tuple[jax.Array | SymbolicZero, ...]) -> tuple[jax.Array | None, ...]:
    """The gradients of the arrays in order, None for those that are not wanted. Raises PlanRefusal."""
    arrays, results, wanted = kept
    if not wanted.names:
        return (None,) * len(arrays)
    saved = dict(zip(wanted.saved, results, strict=True))
    of_results = [jnp.zeros(c.shape, c.dtype) if isinstance(c, SymbolicZero) else c for c in cotangents]
    given = dict(zip(call.inputs, arrays, strict=True)) | saved | dict(zip(("dout", "dlse"), of_results, strict=False))
    gradients = {gradient_argument(n): jax.ShapeDtypeStruct(given[n].shape, given[n].dtype) for n in wanted.names}
    backward = replace(call, does="backward", wanted=wanted.names, inputs=tuple(given))
    location = _location()
    shapes = {name: backward.view(name, _described(array, location)).shape for name, array in given.items()}
    backward.parts(device_of(location), shapes)
    found = dict(zip(gradients, _custom_call(backward, list(given.values()), gradients), strict=True))
    return tuple(found.get(gradient_argument(name)) for name in call.inputs)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)

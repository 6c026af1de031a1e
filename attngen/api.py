"""`load` and `compile`: from a spec to a callable kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Protocol, get_args

from attngen.backward import CompiledBackward, check_dlse, compile_backward, zero_dlse
from attngen.compiled import Compiled
from attngen.device.arrays import ArgumentError, ArgumentTypeError, ArrayView, add_columns, empty_like, mark_written, view
from attngen.device.lazy_kernel import DeferredKernel
from attngen.device.params import Number, declared_params, input_names, named_arguments, refuse_unknown, without_seed
from attngen.device.protocol import Device
from attngen.device.select import device_by_name, emulated_by_name, warn_emulated
from attngen.device.tuning_cache import found_for
from attngen.emit.emitter import emit
from attngen.keywords import SCHEDULE_NAMES, ScheduleName
from attngen.plan import Plan, find_arch
from attngen.plan.arch import Arch
from attngen.plan.facts import DETERMINISTIC
from attngen.schedules import choice_of, choose, default_arch, parts_of, plans_for
from attngen.shipped import find_spec
from attngen.spec.attention import AttentionSpec, Storage
from attngen.spec.check import check
from attngen.spec.dropout import RNG_STATE
from attngen.spec.dtypes import DTYPES
from attngen.spec.gradient import gradients_of_call
from attngen.spec.scales import FORMS, has_scale_forms, with_scale_form

Path = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class CompiledAttention(Compiled):
    """A compiled spec: call it with arrays.

    q [batch, q_heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads, kv_len, head_dim_v], all of
    the spec's dtype, of any array library; captured inputs and params by name. Returns O [batch, q_heads, q_len, head_dim_v],
    and with `output lse` the pair (O, lse [batch, q_heads, q_len] in fp32), as arrays of q's library. If `out` is not given, O
    has the memory layout of q. With dropout, `seed` and `offset` (integers of 64 bits, 0 by default) select the weights that
    are dropped; `rng_state`, an int64 array [2], may hold both. For torch tensors, torch's generator is the default.
    """

    captures: Mapping[str, object] = field(default_factory=dict)
    on_tensors: TensorFunction | None = field(default=None, repr=False, compare=False)
    by_default: bool = field(default=False, repr=False, compare=False)  # on the emulated device, as there is no GPU
    # device and architecture as the caller named them; None if the device was no name
    place: tuple[str, str | None] | None = field(default=None, repr=False, compare=False)
    _backwards: dict[tuple[tuple[str, ...] | None, bool], CompiledBackward] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __reduce__(self) -> tuple[Callable[..., CompiledAttention], tuple[object, ...]]:
        """In another process the spec is compiled again, for the device of the same name. Raises TypeError without a name."""
        if self.place is None:
            raise TypeError(
                "an attention that was compiled for a Device cannot be pickled; compile it for the name of a device"
            )
        import_first = type(self.on_tensors)  # unpickling imports its module, which registers it
        return _compile_again, (self.spec, self.schedule, *self.place, dict(self.captures), import_first)

    def __copy__(self) -> CompiledAttention:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, object]) -> CompiledAttention:
        """With captures of its own: kernels cannot be copied, and need not be."""
        return replace(self, captures=deepcopy(self.captures, memo), on_tensors=deepcopy(self.on_tensors, memo))

    def __repr__(self) -> str:
        spec, plan = self.spec, self.plan
        head = f"{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"{spec.head_dim}, v {spec.head_dim_v}"
        tile = "" if not plan.schedule.is_tiled else f", tile {plan.block_q} x {plan.block_kv}"
        return (
            f"<attngen kernel {spec.name}: {plan.title} on {plan.arch.name}{tile}, {spec.dtype}, head_dim {head}, "
            f"device {self.device.name}>"
        )

    def __call__(
        self,
        q: object,
        k: object,
        v: object = None,
        *,
        out: object = None,
        lse: object = None,
        stream: int | None = None,
        **named: object,
    ) -> Any:
        """O, or (O, lse). Runs on `stream` (a driver stream handle; by default the current stream of q's library). `v` is left
        out if the spec says that it is a part of k.

        O and lse are written to `out` and `lse` if these are given; they must not share memory with an input. If attngen.torch
        was imported before the spec was compiled, calls with torch tensors cost the host least, and torch.compile can trace
        those without `out`, `lse` and `stream`.

        Raises ArgumentError (a ValueError) or ArgumentTypeError (also a TypeError) that names the argument at fault.
        """
        direct = self.on_tensors
        if direct is not None and direct.takes(q):
            return direct(q, k, v, named, out, lse, stream)
        if self.by_default:
            warn_emulated("attngen.compile's kernels, as there is no GPU", 'Name the device to choose: device="emulated".')
        check_stream(stream)
        if lse is not None:
            check_lse_given(self.spec)
        views, params = self._arguments(q, k, v, named, out=out, lse=lse)
        outputs = tuple(self.run(views, params, stream).values())
        mark_written((out, lse))
        return outputs if self.spec.lse else outputs[0]

    def backward(
        self,
        dout: object,
        q: object,
        k: object,
        v: object = None,
        *,
        out: object = None,
        lse: object = None,
        dlse: object = None,
        wanted: Sequence[str] | None = None,
        deterministic: bool = DETERMINISTIC,
        stream: int | None = None,
        **named: object,
    ) -> dict[str, Any]:
        """The gradients of a loss, by name: of q, k and v, or of those that `wanted` names, which may be captured float tensors
        and float params too.

        `dout` is the gradient of the loss with respect to O, of O's shape and type; `dlse` is that with respect to lse (fp32,
        zeros by default). A gradient has the shape and type of its tensor; a param's is one fp32 number. `out` and `lse` are
        the results of the forward: if the schedule needs them and they are not given, the forward runs first. With
        `deterministic`, gradients have the same bits in every run; without, a faster schedule may add them up in any order.

        Raises GradientError for a name in `wanted` that has no gradient, ArgumentError that names the argument at fault,
        PlanRefusal if the schedule has no backward.
        """
        check_stream(stream)
        check_dlse(self.spec, dlse, stream)
        names, computed = gradients_of_call(self.spec, wanted)
        views, params = self._arguments(q, k, v, named, dout=dout, dlse=dlse)
        shapes = {name: array.shape for name, array in views.items()}
        parts = [self.gradients(part, deterministic) for part in self.gradient_parts(computed, deterministic, shapes)]
        if self.spec.lse and dlse is None:
            views["dlse"] = zero_dlse(parts[0].source, views)
        given = {name: array for name, array in (("out", out), ("lse", lse)) if array is not None}
        saved = tuple(dict.fromkeys(name for part in parts for name in part.plan.saved))
        views |= self._saved(saved, given, views, params, stream)
        found = {name: array for part in parts for name, array in part.run(part.inputs_of(views), params, stream).items()}
        if self.spec.values is not None and "k" in names:
            add_columns(found["k"], found["v"], *self.spec.values)
        return {name: found[name] for name in names}

    def _arguments(
        self, q: object, k: object, v: object, named: Mapping[str, object], **others: object
    ) -> tuple[dict[str, ArrayView], Mapping[str, Number]]:
        """The arrays of a call by the names of their arguments, without those of `others` that are None, and its params.

        Raises ArgumentError.
        """
        names = input_names(self.spec)
        named, state = without_seed(names, named)
        if state is not None:
            made = empty_like(view(q, "q"), (2,), RNG_STATE.dtype, RNG_STATE.name).owner
            made[0], made[1] = state
            named = {**named, RNG_STATE.name: made}
        inputs, params = named_arguments(names, declared_params(self.spec), named, self.captures)
        arrays = {"q": q, "k": k, "v": self.spec.values_of(k, v), **dict(zip(names, inputs, strict=True))}
        arrays |= {name: array for name, array in others.items() if array is not None}
        dtypes = {tensor.argument: (tensor.dtype,) for tensor in self.source.tensors}
        return {name: view(array, name, dtypes.get(name, DTYPES)) for name, array in arrays.items()}, params

    def math(self, q: object, k: object, v: object = None, **named: object) -> Any:
        """The same attention, computed by torch's own operations: for torch tensors on any device, in fp64 too. It is
        differentiable any number of times and in forward mode, also with respect to float params, which may be tensors. Memory
        grows with q_len * kv_len. Shapes and results are those of a call. Storage must be dense. Raises ArgumentError."""
        if self.on_tensors is None:
            raise ArgumentError(
                "math() needs attngen.torch: import it before you compile this attention, and name the device by text, as in "
                "device='cuda'"
            )
        return self.on_tensors.math(q, k, v, named)

    def _saved(
        self,
        names: tuple[str, ...],
        given: Mapping[str, object],
        views: Mapping[str, ArrayView],
        params: Mapping[str, Number],
        stream: int | None,
    ) -> dict[str, ArrayView]:
        """The results of the forward that a backward reads: those given, or of a forward that runs now."""
        if given.keys() >= set(names):
            return {name: view(given[name], name) for name in names}
        inputs = {t.argument: views[t.argument] for t in self.source.of_role("input")}
        found = self.saving().run(inputs, params, stream)
        return {name: view(found[name], name) for name in names}

    def saving(self) -> CompiledAttention:
        """This attention with the results that a backward reads, compiled when it is first needed."""
        plan = choose(self.spec, self.plan.arch, self.schedule, saves_lse=True)
        if plan == self.plan:
            return self
        if "saving" not in self._others:
            kernel = DeferredKernel(self.device, emit(self.spec, plan))
            self._others["saving"] = replace(self, plan=plan, kernel=kernel, on_tensors=None, _others={}, _backwards={})
        return self._others["saving"]

    def gradients(self, wanted: tuple[str, ...] | None = None, deterministic: bool = DETERMINISTIC) -> CompiledBackward:
        """The gradients `wanted`, by default those of q, k and v, as a function of arrays; compiled when they are first needed.

        Raises GradientError, PlanRefusal.
        """
        key = wanted, deterministic
        if key not in self._backwards:
            made = compile_backward(self.spec, self.plan.arch, self.device, self.schedule, wanted, deterministic)
            self._backwards[key] = made
        return self._backwards[key]

    def gradient_parts(
        self,
        wanted: tuple[str, ...],
        deterministic: bool = DETERMINISTIC,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> tuple[tuple[str, ...], ...]:
        """The gradients `wanted` in the parts that have a program each (`attngen.schedules.parts_of`)."""
        return parts_of(self.spec, self.plan.arch, self.schedule, wanted, deterministic, shapes)

    def run(self, arrays: Mapping[str, ArrayView], params: Mapping[str, Number], stream: int | None = None) -> dict[str, Any]:
        """The outputs by the names of their arguments; what `arrays` lacks of them is allocated. Raises ArgumentError."""
        bound = self.bind(arrays, params)
        bound.run(stream)
        return bound.outputs

    def _with(self, plan: Plan) -> CompiledAttention:
        return replace(Compiled._with(self, plan), captures=self.captures)


class TensorFunction(Protocol):
    """A compiled spec as a function of one library's tensors, with that library's own dispatch."""

    def takes(self, q: object) -> bool: ...

    def __call__(
        self, q: Any, k: Any, v: Any, named: Mapping[str, Any], out: Any | None, lse: Any | None, stream: int | None
    ) -> Any: ...

    def math(self, q: Any, k: Any, v: Any, named: Mapping[str, Any]) -> Any: ...


MakeTensorFunction = Callable[[AttentionSpec, str | None, Mapping[str, object], str], TensorFunction]
_tensor_functions: list[MakeTensorFunction] = []


def register_tensor_function(make: MakeTensorFunction) -> None:
    """Registers `make`(spec, schedule, captures, device), by which compiled specs take a library's tensors."""
    _tensor_functions.append(make)


def load(path: Path) -> AttentionSpec:
    """The spec of a name: the path of an `.attn` file, the name of a shipped file or of an attention in one, or, of a file with
    several attentions, FILE:ATTENTION.

    Raises DiagnosticError for mistakes in the file, OSError if it cannot be read, ArgumentError if the name stands for several
    attentions or the file has none of that name.
    """
    from attngen.language.load import choices

    loaded = load_all(path)
    if len(loaded) > 1:
        raise ArgumentError(f"{path} has {len(loaded)} attentions; name one of them: {choices(str(path), loaded)}")
    return loaded[0]


def load_all(path: Path) -> tuple[AttentionSpec, ...]:
    """All specs that a name stands for: those of a file, in its order. Names and errors are those of `load`."""
    from attngen.language import load_file

    return load_file(*find_spec(path))


def compile(
    spec: AttentionSpec | Path,
    *,
    kernel: str | None = None,
    device: Device | str = "auto",
    arch: str | None = None,
    captures: Mapping[str, object] | None = None,
    ahead: Sequence[str] = (),
    storage: Storage | None = None,
) -> CompiledAttention:
    """A callable that computes `spec`: an AttentionSpec, or the name of one, as `load` takes it.

    `kernel` (naive, tiled, fused, wgmma, hopper, decode, auto) overrides the spec's own statement. `device` is "cuda",
    "cuda:N", "emulated", "emulated:fast" (without checks), "auto" (cuda if there is a GPU) or a Device. `arch` is the
    architecture to plan for, by default the device's own. `captures` gives arrays by name for inputs, which calls then omit.
    `ahead` names architectures whose cubins are compiled into the cache on disk now, with or without a GPU, so that a serving
    process finds them there. If the plan depends on the sizes of a call (`attngen explain` names the plans), or the scale on
    its params, a kernel is compiled by the first call that uses it; otherwise it is compiled now.

    `storage` overrides the spec's own. With "packed", q and k, v are [total, heads, size], the rows of all sequences one after
    another, and calls are given `cu_seqlens_q`, `cu_seqlens_k` (int32 [batch + 1]: where each sequence begins and the last one
    ends) and `max_q_len`, `max_kv_len`: lengths that no sequence exceeds, because the host does not read the tensors. lse is
    [q_heads, total]. With "padded", calls are given `seqused` (int32 [batch]): k and v [batch, kv_heads, kv_len, size] hold the
    first seqused[i] keys of sequence i. With "paged", they are given `page_table` (int32 [batch, max_pages]) too, and k and v
    are [pages, kv_heads, page_size, size]; "packed_paged" has the queries of "packed" and the keys of "paged".

    Raises DiagnosticError for mistakes in the text, PlanRefusal for overrides that do not fit, ArgumentError for a schedule, an
    architecture or a captured input that does not exist, DeviceError if the device cannot compile.
    """
    if kernel is not None:
        check_schedule("kernel", kernel)
    _check_types(spec, device, arch, captures, ahead)
    spec = _checked(spec, storage)
    given = dict(captures or {})
    for param in spec.params:
        if param.name in given:
            raise ArgumentError(f"`{param.name}` is a param, and captures are for inputs; pass {param.name}=... to calls")
    refuse_unknown(list(given), [i.name for i in spec.inputs])
    place = device_by_name(device) if isinstance(device, str) else device
    on_gpu = place.name.startswith("cuda")
    if not on_gpu and device != "auto":
        emulated_by_name()
    for target in ahead:
        _compile_into_cache(spec, target, kernel)
    if arch is None and not isinstance(device, str):
        arch = place.arch
    on_tensors = None
    operator_carries = isinstance(device, str) and device != "emulated:fast" and arch is None
    if _tensor_functions and operator_carries:
        on_tensors = _tensor_functions[-1](spec, kernel, given, place.name if on_gpu else "cpu")
    made = _planned(place, spec, kernel, arch)
    named = (device, arch) if isinstance(device, str) else None
    by_default = not on_gpu and device == "auto"
    return replace(made, captures=given, on_tensors=on_tensors, by_default=by_default, place=named)


def _compile_again(
    spec: AttentionSpec, kernel: str | None, device: str, arch: str | None, captures: Mapping[str, object], _: type
) -> CompiledAttention:
    return compile(spec, kernel=kernel, device=device, arch=arch, captures=captures)


def _checked(spec: AttentionSpec | Path, storage: Storage | None) -> AttentionSpec:
    """The spec to compile, with `storage` if it is given. Raises DiagnosticError, ArgumentError."""
    if isinstance(spec, AttentionSpec):
        check(spec)
    else:
        spec = load(spec)
    if storage is not None and storage != spec.kernel.storage:
        if storage not in get_args(Storage):
            raise ArgumentError(f"storage is {storage!r}; expected {', '.join(get_args(Storage))}")
        spec = replace(spec, kernel=replace(spec.kernel, storage=storage))
        check(spec)
    return spec


def _compile_into_cache(spec: AttentionSpec, arch: str, kernel: str | None) -> None:
    """Compiles every plan for an architecture. Raises ArgumentError, PlanRefusal, CompilationError."""
    from attngen.device.cuda.compiler import cubin

    for one in {with_scale_form(spec, form) for form in FORMS} if has_scale_forms(spec) else (spec,):
        for plan in plans_for(one, _arch(arch), kernel):
            cubin(emit(one, plan))


def _check_types(spec: object, device: object, arch: object, captures: object, ahead: object) -> None:
    """Raises ArgumentTypeError for an argument of `compile` of the wrong type."""
    for keyword, given, fits, expected in (
        ("spec", spec, isinstance(spec, (AttentionSpec, str, PathLike)), "an AttentionSpec, a path, or a shipped name"),
        ("device", device, isinstance(device, str) or hasattr(device, "compile"), "the name of a device, or a Device"),
        ("arch", arch, arch is None or isinstance(arch, str), "the name of an architecture, as `attngen list` has them"),
        ("captures", captures, captures is None or isinstance(captures, Mapping), "a mapping from names to arrays"),
        ("ahead", ahead, not isinstance(ahead, str) and isinstance(ahead, Sequence), "a list of architectures"),
    ):
        if not fits:
            raise ArgumentTypeError(f"`{keyword}` is {given!r}; expected {expected}")


def check_lse_given(spec: AttentionSpec) -> None:
    """Raises ArgumentError if the spec has no lse that a call's `lse` could hold."""
    if not spec.lse:
        raise ArgumentError("`lse` was given, but the spec has no `output lse`")


def check_stream(stream: object) -> None:
    """Raises ArgumentTypeError if `stream` is not the handle of a stream."""
    if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int)):
        raise ArgumentTypeError(f"`stream` is {stream!r}; expected the driver's handle, as torch.cuda.Stream.cuda_stream")


def compile_later(spec: AttentionSpec, device: str, kernel: str | None = None, arch: str | None = None) -> CompiledAttention:
    """A callable that computes a checked spec on the device of that name, planned as by `compile`. The first call whose
    arguments fit compiles the kernel, so a call that is refused compiles nothing. Raises PlanRefusal, DeviceError."""
    return _planned(device_by_name(device), spec, kernel, arch, later=True)


def _planned(
    place: Device, spec: AttentionSpec, kernel: str | None, arch: str | None, later: bool = False
) -> CompiledAttention:
    """The spec as a callable, planned for `arch`: by default the device's own, or one that has the kernel's instructions if the
    device is emulated."""
    on_gpu = place.name.startswith("cuda")
    usual = place.arch if on_gpu else default_arch(kernel or spec.kernel.schedule)
    plan = choose(spec, _arch(arch or usual), kernel)
    found = found_for(spec, plan) if on_gpu else {}
    by_sizes = bool(choice_of(spec, plan.arch, kernel).rules)
    source = emit(spec, plan)
    by_scale = has_scale_forms(spec)
    made = DeferredKernel(place, source) if later or by_sizes or by_scale or found else place.compile(source)
    return CompiledAttention(spec, plan, made, place, tuned=found, by_sizes=by_sizes, by_scale=by_scale, schedule=kernel)


def check_schedule(keyword: str, said: str, *others: str) -> None:
    """Raises ArgumentError if `said`, the value of `keyword`, is neither a schedule nor one of `others`."""
    if said not in (*get_args(ScheduleName), *others):
        names: list[str] = [*SCHEDULE_NAMES, "auto", *others]
        *known, last = names
        raise ArgumentError(f"{keyword} is {said!r}; expected {', '.join(known)} or {last}")


def _arch(name: str) -> Arch:
    found = find_arch(name)
    if found is None:
        raise ArgumentError(f"no architecture is called {name}; `attngen list` names them")
    return found

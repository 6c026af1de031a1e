"""`load` and `compile`: from a spec to a callable kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from os import PathLike
from typing import Any, Protocol, get_args

from attngen.device.arrays import CPU, ArgumentError, ArgumentTypeError, ArrayView, empty_like_owner, view
from attngen.device.binding import Apart, Bound, bind, check_params, measure, refuse_unknown, shapes_to_allocate
from attngen.device.choose import emulated_by_name, warn_emulated
from attngen.device.deferred import DeferredKernel
from attngen.device.protocol import Device, Kernel
from attngen.device.tuned import Bucket, Winner, bucket_of, is_open, remembered
from attngen.emit.emitter import emit
from attngen.emit.kernel_source import MULTIPROCESSORS, KernelSource
from attngen.plan import Decision, Plan, PlanRefusal, Problem, choose, default_arch, depends_on_sizes, find_arch, plans_for
from attngen.plan.arch import Arch
from attngen.shipped import find_spec
from attngen.spec.attention import AttentionSpec, Rung
from attngen.spec.check import check
from attngen.spec.dtypes import DTYPES

Path = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class CompiledAttention:
    """A compiled spec: call it with arrays.

    q [batch, q_heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads, kv_len, head_dim_v], all of
    the spec's dtype, of any array library; captured inputs and params by name. Gives O [batch, q_heads, q_len, head_dim_v],
    and with `output lse` the pair (O, lse [batch, q_heads, q_len] in fp32), as arrays of q's library.
    """

    spec: AttentionSpec
    plan: Plan
    kernel: Kernel
    device: Device
    captures: Mapping[str, Any] = field(default_factory=dict)
    of_tensors: OfTensors | None = field(default=None, repr=False, compare=False)
    tuned: Mapping[Bucket, Winner] = field(default_factory=dict, repr=False, compare=False)
    by_sizes: bool = field(default=False, repr=False, compare=False)  # whether the plan depends on the sizes of a call
    by_default: bool = field(default=False, repr=False, compare=False)  # on the emulated device because there is no GPU
    _others: dict[Any, CompiledAttention] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        spec, plan = self.spec, self.plan
        head = f"{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"{spec.head_dim}, v {spec.head_dim_v}"
        tile = "" if plan.rung == "naive" else f", tile {plan.block_q} x {plan.block_kv}"
        return (
            f"<attngen kernel {spec.name}: {plan.title} on {plan.arch.name}{tile}, {spec.dtype}, head_dim {head}, "
            f"device {self.device.name}>"
        )

    @property
    def source(self) -> KernelSource:
        """The generated CUDA and its ABI."""
        return self.kernel.source

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any | None = None,
        lse: Any | None = None,
        stream: int | None = None,
        **named: Any,
    ) -> Any:
        """O, or (O, lse). Runs on `stream` (a driver stream handle; by default the current stream of q's library).

        O and lse are written to `out` and `lse` where these are given; they may not share memory with an input. Where
        attngen.torch was imported before the spec was compiled, calls with its tensors cost the host least, and without `out`,
        `lse` and `stream` they can be traced by torch.compile.

        Raises ArgumentError (a ValueError) or ArgumentTypeError (also a TypeError) that names the argument at fault.
        """
        direct = self.of_tensors
        if direct is not None and direct.takes(q):
            return direct(q, k, v, named, out, lse, stream)
        if self.by_default:
            warn_emulated("attngen.compile's kernels, as there is no GPU", 'Name the device to choose: device="emulated".')
        check_stream(stream)
        named = {**self.captures, **named}
        spec = self.spec
        params = {p.name: (str(p.type), p.default) for p in spec.params}
        inputs = [i.name for i in spec.inputs]
        refuse_unknown(list(named), [*inputs, *params])
        arrays = {"Q": view(q, "q"), "K": view(k, "k"), "V": view(v, "v")}
        for name in inputs:
            if name not in named:
                raise ArgumentError(f"input `{name}` was not given; pass {name}=...")
            arrays[name] = view(named[name], name)
        if out is not None:
            arrays["O"] = view(out, "out")
        if lse is not None:
            if not spec.lse:
                raise ArgumentError("`lse` was given, but the spec does not say `output lse`")
            arrays["lse"] = view(lse, "lse")
        self.run(arrays, check_params(params, named), stream)
        output = arrays["O"].owner
        return (output, arrays["lse"].owner) if spec.lse else output

    def run(self, arrays: dict[str, ArrayView], params: Mapping[str, int | float], stream: int | None) -> dict[str, ArrayView]:
        """`arrays` with the computed outputs, by the names of the source's tensors; missing outputs are allocated. Raises
        ArgumentError."""
        given = [name for name in ("O", "lse") if name in arrays]
        chosen = self.at(arrays)
        bound = chosen.bind(arrays, params)
        if given:
            Apart(list(arrays.values())).check([array.pointer for array in arrays.values()])
        if bound.launches:
            chosen.kernel.launch(bound.launches, bound.memory, _stream(stream, arrays["Q"]))
        return arrays

    def at(self, arrays: Mapping[str, ArrayView]) -> CompiledAttention:
        """This attention planned for the sizes of `arrays`: as tuned, else as the planner chooses, which may be this plan.

        A plan that no call has needed before is compiled now.
        """
        if not self.tuned and not self.by_sizes:
            return self
        sizes = measure(self.source, arrays)
        bucket = bucket_of(sizes)
        winner = self.tuned.get(bucket)
        if winner is not None:
            if bucket not in self._others:
                self._others[bucket] = self._as_tuned(winner)
            return self._others[bucket]
        if not self.by_sizes:
            return self
        heads = sizes["batch"] * arrays["Q"].shape[1]
        problem = Problem(heads, sizes["q_len"], sizes["kv_len"], self.device.multiprocessors)
        plan = choose(self.spec, self.plan.arch, self.plan.rung, problem)
        tile = (plan.block_q, plan.block_kv)
        if tile == (self.plan.block_q, self.plan.block_kv):
            return self
        if tile not in self._others:
            self._others[tile] = self._with(plan)
        return self._others[tile]

    def _with(self, plan: Plan) -> CompiledAttention:
        kernel = self.device.compile(emit(self.spec, plan))
        return CompiledAttention(self.spec, plan, kernel, self.device, self.captures)

    def _as_tuned(self, winner: Winner) -> CompiledAttention:
        try:
            plan = choose(replace(self.spec, schedule=winner.schedule), self.plan.arch)
        except PlanRefusal:  # another version of attngen found it
            return self
        times = f"{winner.milliseconds:.3f} ms, the planner's own choice {winner.planned_milliseconds:.3f}"
        decisions = [replace(d, because=d.because.replace("as the spec asks", "as tuned")) for d in plan.decisions]
        return self._with(
            replace(plan, decisions=(Decision("tuned", "by `attngen tune`", f"{times}, on {winner.where}"), *decisions))
        )

    def bind(self, arrays: dict[str, ArrayView], params: Mapping[str, int | float]) -> Bound:
        """The launches of a call. `arrays`, by the names of the source's tensors, are checked, and missing ones are allocated
        into it. Raises ArgumentError."""
        sizes = measure(self.source, arrays) | {MULTIPROCESSORS: self.device.multiprocessors}
        self._check_place(arrays["Q"])
        _check_indices(self.spec, sizes, params)
        for name, shape in shapes_to_allocate(self.source, sizes).items():
            if name not in arrays:
                arrays[name] = self._allocate(name, shape, arrays["Q"])
        return bind(self.source, arrays, sizes, params)

    def _check_place(self, q: ArrayView) -> None:
        wanted = self.device.name if self.device.name.startswith("cuda") else "cpu"
        if str(q.location) != wanted:
            raise ArgumentError(
                f"`q` is on {q.location}, and this kernel was compiled for the {self.device.name} device; "
                f"move the arrays to {wanted}, or compile for the other device"
            )

    def _allocate(self, name: str, shape: tuple[int, ...], q: ArrayView) -> ArrayView:
        tensor = next(t for t in self.source.tensors if t.name == name)
        owner = q.owner[0] if isinstance(q.owner, tuple) else q.owner
        return view(empty_like_owner(owner, shape, DTYPES[tensor.dtype], q.location), name)


class OfTensors(Protocol):
    """A compiled spec as a function of tensors of one library."""

    def takes(self, q: Any) -> bool: ...

    def __call__(
        self, q: Any, k: Any, v: Any, named: Mapping[str, Any], out: Any | None, lse: Any | None, stream: int | None
    ) -> Any: ...


MakeOfTensors = Callable[[AttentionSpec, str | None, Mapping[str, Any], str], OfTensors]
_of_tensors: list[MakeOfTensors] = []


def register_of_tensors(make: MakeOfTensors) -> None:
    """Registers `make`(spec, rung, captures, device), which makes compiled specs callable with the tensors of a library."""
    _of_tensors.append(make)


def _stream(stream: int | None, q: ArrayView) -> int | None:
    """`stream` if given, else the current stream of torch or CuPy if q belongs to one of them."""
    if stream is not None or q.location == CPU:
        return stream
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(q.owner, torch.Tensor):
        return int(torch.cuda.current_stream(q.location.ordinal).cuda_stream)
    return int(cupy.cuda.get_current_stream().ptr) if cupy is not None else None


def _check_indices(spec: AttentionSpec, sizes: dict[str, int], params: Mapping[str, int | float]) -> None:
    """Refuse a call whose expressions would read outside a captured tensor or divide by zero."""
    if spec.inputs or spec.params:
        from attngen.spec.obligations import check_obligations

        check_obligations(spec, sizes, params)


def preload() -> None:
    """Loads the compiler now (about 0.2 s), so that the first kernel takes no longer than later ones."""
    from attngen.emit import emitter
    from attngen.language.prelude import prelude

    prelude()
    emitter.preload()


def load(path: Path) -> AttentionSpec | tuple[AttentionSpec, ...]:
    """The spec in an `.attn` file, or the shipped one of that name; a tuple if the file holds several.

    Raises DiagnosticError for mistakes in it, OSError if it cannot be read.
    """
    from attngen.language import load_file

    specs = load_file(find_spec(path))
    return specs[0] if len(specs) == 1 else specs


def compile(
    spec: AttentionSpec | Path,
    *,
    kernel: str | None = None,
    device: Device | str = "auto",
    arch: str | None = None,
    captures: Mapping[str, Any] | None = None,
    ahead: Sequence[str] = (),
) -> CompiledAttention:
    """Compile a spec, the one in an `.attn` file, or the shipped one of a name, into a callable.

    `kernel` (naive, tiled, fused, wgmma, hopper, auto) overrides the spec's own statement; `device` is "cuda", "emulated",
    "auto" (cuda where there is a GPU) or a Device; `arch` is for planning only and is the device's own by default. `captures`
    are arrays by name for inputs that calls leave out. `ahead` names architectures whose cubins are compiled into the cache on
    disk now, with or without a GPU, so that a process that serves finds them there. Where the sizes of a call decide which plan
    it takes (`attngen explain` names them), each is compiled by the first call that takes it; others are compiled now.

    Raises DiagnosticError for mistakes in the text, PlanRefusal for overrides that do not fit, ArgumentError for a rung, an
    architecture or a captured input that does not exist, DeviceError where the device cannot compile.
    """
    if kernel is not None:
        check_rung("kernel", kernel)
    _check_types(spec, device, arch, captures, ahead)
    if not isinstance(spec, AttentionSpec):
        loaded = load(spec)
        if isinstance(loaded, tuple):
            names = ", ".join(s.name for s in loaded)
            raise ArgumentError(f"{spec} holds several attentions ({names}); load it and pass one of them")
        spec = loaded
    else:
        check(spec)
    given = dict(captures or {})
    for param in spec.params:
        if param.name in given:
            raise ArgumentError(f"`{param.name}` is a param, and captures are inputs; pass {param.name}=... to calls")
    refuse_unknown(list(given), [i.name for i in spec.inputs])
    place = _device(device) if isinstance(device, str) else device
    on_gpu = place.name.startswith("cuda")
    if not on_gpu and device != "auto":
        emulated_by_name()
    if ahead:
        from attngen.device.cuda.compiler import cubin

        for target in ahead:
            for plan in plans_for(spec, _arch(target), kernel):
                cubin(emit(spec, plan))
    if arch is None and not isinstance(device, str):
        arch = place.arch
    of_tensors = None
    if _of_tensors and isinstance(device, str) and arch is None and device != "emulated:fast":  # what the operator cannot carry
        of_tensors = _of_tensors[-1](spec, kernel, given, place.name if on_gpu else "cpu")
    made = _on(place, spec, kernel, arch)
    return replace(made, captures=given, of_tensors=of_tensors, by_default=not on_gpu and device == "auto")


def _check_types(spec: Any, device: Any, arch: Any, captures: Any, ahead: Any) -> None:
    """Raises ArgumentTypeError for an argument of `compile` of the wrong type."""
    for keyword, given, fits, expected in (
        (
            "spec",
            spec,
            isinstance(spec, (AttentionSpec, str, PathLike)),
            "an AttentionSpec, a path, or a shipped name",
        ),
        ("device", device, isinstance(device, str) or hasattr(device, "compile"), "the name of a device, or a Device"),
        ("arch", arch, arch is None or isinstance(arch, str), "the name of an architecture, as `attngen list` has them"),
        ("captures", captures, captures is None or isinstance(captures, Mapping), "a mapping from names to arrays"),
        ("ahead", ahead, not isinstance(ahead, str) and isinstance(ahead, Sequence), "a list of architectures"),
    ):
        if not fits:
            raise ArgumentTypeError(f"`{keyword}` is {given!r}; expected {expected}")


def check_stream(stream: Any) -> None:
    """Raises ArgumentTypeError if `stream` is not the handle of a stream."""
    if stream is not None and not isinstance(stream, int):
        raise ArgumentTypeError(f"`stream` is {stream!r}; expected the driver's handle, as torch.cuda.Stream.cuda_stream")


def compile_later(spec: AttentionSpec, device: str, kernel: str | None = None) -> CompiledAttention:
    """A checked spec as a callable on the device of that name. The first call whose arguments fit compiles the kernel, so a
    call that is refused compiles nothing. Raises PlanRefusal, DeviceError."""
    return _on(_device(device), spec, kernel, None, later=True)


def _on(place: Device, spec: AttentionSpec, kernel: str | None, arch: str | None, later: bool = False) -> CompiledAttention:
    """`spec` planned for `arch`: by default the device's; on the emulated device, one that has the kernel's instructions."""
    on_gpu = place.name.startswith("cuda")
    usual = place.arch if on_gpu else default_arch(kernel or spec.schedule.rung)
    plan = choose(spec, _arch(arch or usual), kernel)
    found = remembered(spec, plan.arch.name, plan.rung) if on_gpu and plan.is_fused and is_open(spec) else {}
    by_sizes = depends_on_sizes(spec, plan)
    source = emit(spec, plan)
    made = DeferredKernel(place, source) if later or by_sizes or found else place.compile(source)
    return CompiledAttention(spec, plan, made, place, tuned=found, by_sizes=by_sizes)


def check_rung(keyword: str, said: str) -> None:
    if said not in get_args(Rung):
        raise ArgumentError(f"{keyword} is {said!r}; expected naive, tiled, fused, wgmma, hopper or auto")


def _arch(name: str) -> Arch:
    found = find_arch(name)
    if found is None:
        raise ArgumentError(f"no architecture is called {name}; `attngen list` names them")
    return found


@cache
def _device(name: str) -> Device:
    from attngen.device.choose import device_by_name

    return device_by_name(name)

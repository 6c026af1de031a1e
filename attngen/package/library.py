"""The files of a library, from the specs that it packages."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from types import MappingProxyType

from attngen.cache.disk_cache import digest
from attngen.device.binding import ANY_SIZE, MAX_GRID, ROW_BYTES
from attngen.device.cuda.compiler import CACHE, compile_text, cubin, nvrtc_version
from attngen.device.cuda.device import STATIC_SHARED_LIMIT
from attngen.device.tensor_map import ALIGNMENT, MAX_SIZE, MAX_STRIDE
from attngen.emit.emitter import environment
from attngen.emit.program import PACKED_ROWS, KernelEntry, Program
from attngen.package.context import SpecContext
from attngen.package.functions import Packaged
from attngen.package.hub import CUDA, TORCH, hub_functions, metadata
from attngen.package.of_spec import OfSpec, capability_of
from attngen.package.python_module import DLPACK, python_spec
from attngen.package.statuses import STATUSES
from attngen.package.test_program import PHILOX, TestSpec, is_tested, limits
from attngen.spec.expr import MAX_INT_PARAM, MAX_LENGTH

WORDS_OF_A_LINE = 6
MOST_DIMS = 10  # dimensions of an array or a workspace
MAP_LIMITS = {
    "size": MAX_SIZE,
    "stride": MAX_STRIDE,
    "alignment": ALIGNMENT,
    "any_size": ANY_SIZE,
    "packed_rows": PACKED_ROWS,
}
CODE = "code"  # the folder of compiled kernels
DRIVER_FUNCTIONS = (
    "cuCtxGetDevice",
    "cuDeviceGetAttribute",
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelSetAttribute",
    "cuLaunchKernelEx",
    "cuMemsetD32Async",
    "cuTensorMapEncodeTiled",
    "cuThreadExchangeStreamCaptureMode",
)

CONTEXT_FUNCTIONS = ("cuCtxGetDevice", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent")
TEST_FUNCTIONS = (
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemcpyHtoD",
    "cuMemcpyDtoH",
    "cuMemsetD8",
)

Compile = Callable[[Program, str], bytes]  # the code of a program, as "cubin" or "ptx"


@dataclass(frozen=True, slots=True)
class Image:
    """One compiled program in the library."""

    id: str
    program: Program
    target: str  # "cubin", "ptx"
    data: bytes

    @property
    def count(self) -> int:
        return -(-len(self.data) // 8)

    @property
    def words(self) -> str:
        """Its words of 64 bits, the first byte the lowest, as C++."""
        padded = self.data + bytes(-len(self.data) % 8)
        texts = [f"0x{word:x}," for word in struct.unpack(f"<{self.count}Q", padded)]
        return "".join(" ".join(texts[i : i + WORDS_OF_A_LINE]) + "\n" for i in range(0, self.count, WORDS_OF_A_LINE))


@dataclass(frozen=True, slots=True)
class Library:
    """A library's specs and images."""

    name: str
    specs: tuple[OfSpec, ...]
    images: tuple[Image, ...]
    kernels: tuple[tuple[str, KernelEntry], ...]  # with the id of their program

    @property
    def code_bytes(self) -> int:
        return sum(len(image.data) for image in self.images)


def compiled(program: Program, target: str) -> bytes:
    """The cubin or the PTX of a program, from the cache on disk or compiled. Raises CompilationError, DeviceError."""
    if target == "cubin":
        return cubin(program)
    key = digest(program.text, program.arch, nvrtc_version(), target)
    return CACHE.data(f"{program.name}-{program.arch}-{key}.ptx", lambda: compile_text(program, target).code)


def library(name: str, specs: Sequence[Packaged], *, ptx: bool = False, compile: Compile = compiled) -> Library:
    """The library called `name` of these functions. `ptx`: kernels of architectures without features of their own are also PTX,
    which newer GPUs compile. Raises CompilationError, DeviceError."""
    ids = dict(_ids(specs))
    kernels: list[tuple[str, KernelEntry]] = []
    of_specs = tuple(SpecContext(one, ids, kernels, ptx).made() for one in specs)
    wanted = [
        (id, program, target)
        for program, id in ids.items()
        for target in ("cubin", "ptx")
        if target == "cubin" or (ptx and not capability_of(program.arch)[1])
    ]
    with ThreadPoolExecutor(cpu_count()) as pool:
        data = pool.map(lambda one: compile(one[1], one[2]), wanted)
        images = tuple(
            Image(id if target == "cubin" else f"{id}_ptx", program, target, found)
            for (id, program, target), found in zip(wanted, data, strict=True)
        )
    return Library(name, of_specs, images, tuple(kernels))


def _ids(specs: Sequence[Packaged]) -> Iterator[tuple[Program, str]]:
    """A name for each program: that of the program and its architecture, with a number from the second one on."""
    used: Counter[str] = Counter()
    for program in dict.fromkeys(p for one in specs for p in one.programs):
        name = f"{program.name}_{program.arch}"
        used[name] += 1
        yield program, name if used[name] == 1 else f"{name}_{used[name]}"


def files(made: Library) -> dict[str, bytes]:
    """The files of a library by their paths, the same for the same specs, compiler and version of attngen."""
    texts = {f"{made.name}.h": _rendered("library.h", made), f"{made.name}.cpp": _rendered("library.cpp", made)}
    texts[f"{made.name}_test.cpp"] = _rendered("test.cpp", made, test_context(made))
    python = {"specs": [python_spec(one) for one in made.specs], "dlpack": DLPACK, "driver_functions": CONTEXT_FUNCTIONS}
    texts[f"{made.name}_kernels.cpp"] = _rendered("python.cpp", made, python)

    def of_target(target: str) -> set[str]:
        return {image.program.arch for image in made.images if image.target == target}

    hub = {"functions": list(hub_functions(made.specs)), "variant": f"{TORCH}-{CUDA}"}
    texts["CMakeLists.txt"] = _rendered("CMakeLists.txt", made, hub)
    texts["hub/__init__.py"] = _rendered("hub_init.py", made, hub)
    texts["hub/metadata.json"] = metadata(made.name, of_target("cubin"), of_target("ptx"))
    for image in made.images:
        what = f"The {image.target} of {image.program.name} for {image.program.arch}"
        context = {"lib": made.name, "id": image.id, "count": image.count, "words": image.words, "what": what}
        texts[f"{CODE}/{image.id}.cpp"] = _template("image.cpp").render(context)
    return {path: text.encode() for path, text in texts.items()}


def _template(name: str):  # type: ignore[no-untyped-def]
    return environment().get_template(f"package/{name}.j2")


def _rendered(template: str, made: Library, more: Mapping[str, object] = MappingProxyType({})) -> str:
    return str(_template(template).render({**context_of(made), **more}))


def test_context(made: Library) -> dict[str, object]:
    """What the templates of a test program read."""
    specs = [TestSpec(one) for one in made.specs if is_tested(one)]
    philox = PHILOX if any(one.dropout_form == "philox" for one in specs) else None
    return {"specs": specs, "limits": limits(), "philox": philox, "driver_functions": TEST_FUNCTIONS}


def context_of(made: Library) -> Mapping[str, object]:
    """What the templates of a library read."""
    arguments = tuple(dict.fromkeys(a.name for spec in made.specs for a in spec.arguments))
    dims = max((len(a.dims) for spec in made.specs for a in spec.arguments), default=0)
    places = {image.id: number for number, image in enumerate(i for i in made.images if i.target == "cubin")}
    with_ptx = {image.id for image in made.images if image.target == "ptx"}
    modules = []
    for image in made.images:
        if image.target == "cubin":
            capability, exact = capability_of(image.program.arch)
            ptx = f"&image_{image.id}_ptx" if f"{image.id}_ptx" in with_ptx else "nullptr"
            modules.append({"code": image.id, "ptx": ptx, "capability": capability, "exact": exact})
    return {
        "lib": made.name,
        "LIB": made.name.upper(),
        "specs": made.specs,
        "images": made.images,
        "modules": modules,
        "kernels": [{"module": places[id], "entry": entry} for id, entry in made.kernels],
        "statuses": STATUSES,
        "arguments": arguments,
        "numbers": {"": 0} | {name: number for number, name in enumerate(arguments, 1)},
        "max_rank": max(dims, 1),
        "max_dims": MOST_DIMS,
        "max_length": MAX_LENGTH,
        "max_int_param": MAX_INT_PARAM,
        "max_grid": MAX_GRID,
        "row_bytes": ROW_BYTES,
        "map_limits": MAP_LIMITS,
        "static_shared": STATIC_SHARED_LIMIT,
        "driver_functions": DRIVER_FUNCTIONS,
    }

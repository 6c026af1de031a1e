"""The structures of XLA's interface against its header, and the handler for GPUs against a made-up XLA."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

from attngen.device.arrays import ArrayView, Location  # noqa: E402
from attngen.jax import xla  # noqa: E402
from attngen.spec.dtypes import DTYPES  # noqa: E402

HEADER = {  # structures, with the header's names of their members
    xla.Version: ("XLA_FFI_Api_Version", {"major": "major_version", "minor": "minor_version"}),
    xla.Metadata: ("XLA_FFI_Metadata", {"version": "api_version"}),
    xla.ErrorCreate: ("XLA_FFI_Error_Create_Args", {"code": "errc"}),
    xla.ErrorOnly: ("XLA_FFI_Error_Destroy_Args", {}),
    xla.ErrorMessage: ("XLA_FFI_Error_GetMessage_Args", {}),
    xla.StreamGet: ("XLA_FFI_Stream_Get_Args", {}),
    xla.Allocate: ("XLA_FFI_DeviceMemory_Allocate_Args", {}),
    xla.Free: ("XLA_FFI_DeviceMemory_Free_Args", {}),
    xla.Span: ("XLA_FFI_ByteSpan", {}),
    xla.Buffer: ("XLA_FFI_Buffer", {}),
    xla.Values: ("XLA_FFI_Args", {"values": "args"}),
    xla.Attributes: ("XLA_FFI_Attrs", {"values": "attrs"}),
    xla.Frame: ("XLA_FFI_CallFrame", {}),
    xla.Api: (
        "XLA_FFI_Api",
        {
            "version": "api_version", "internal": "internal_api", "error_create": "XLA_FFI_Error_Create",
            "error_message": "XLA_FFI_Error_GetMessage", "error_destroy": "XLA_FFI_Error_Destroy",
            "handler_register": "XLA_FFI_Handler_Register", "stream_get": "XLA_FFI_Stream_Get",
            "type_register": "XLA_FFI_Type_Register", "context_get": "XLA_FFI_ExecutionContext_Get",
            "state_set": "XLA_FFI_State_Set", "state_get": "XLA_FFI_State_Get",
            "memory_allocate": "XLA_FFI_DeviceMemory_Allocate", "memory_free": "XLA_FFI_DeviceMemory_Free",
        },
    ),
}  # fmt: skip
CONSTANTS = {
    "XLA_FFI_Extension_Metadata": xla.METADATA,
    "XLA_FFI_AttrType_STRING": xla.STRING,
    "XLA_FFI_Error_Code_INVALID_ARGUMENT": xla.INVALID_ARGUMENT,
    "XLA_FFI_Error_Code_INTERNAL": xla.INTERNAL,
    "XLA_FFI_API_MAJOR": xla.OLDEST[0],
    **{
        f"XLA_FFI_DataType_{theirs}": next(code for code, ours in xla.TYPES.items() if ours == name)
        for theirs, name in {
            "PRED": "bool", "S32": "int32", "S64": "int64", "F16": "fp16", "F32": "fp32", "BF16": "bf16",
            "F8E5M2": "fp8_e5m2", "F8E4M3FN": "fp8_e4m3",
        }.items()
    },
}  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    lines = [f"static_assert({name} == {value});" for name, value in CONSTANTS.items()]
    for structure, (name, renamed) in HEADER.items():
        for member, *_ in structure._fields_:
            field = getattr(structure, member)
            theirs = f"{name}, {renamed.get(member, member)}"
            lines.append(f"static_assert(offsetof({theirs}) == {field.offset});")
            lines.append(f"static_assert(sizeof({name}::{renamed.get(member, member)}) == {field.size});")
    lines.append(f"static_assert(offsetof(XLA_FFI_Metadata_Extension, metadata) == {xla.Extension.metadata.offset});")
    source = tmp_path / "check.cpp"
    source.write_text("#include <cstddef>\n#include <xla/ffi/api/c_api.h>\n" + "\n".join(lines) + "\n")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{jax.ffi.include_dir()}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


class FakeXla:
    """XLA as a handler sees it: one call with an input and a result of 4 numbers, on stream 77, and memory of the host."""

    def __init__(self, refuses: str = "", offset: int = 16) -> None:
        """`offset` is the distance of its memory from 256 bytes: XLA promises 16."""
        self.offset = offset
        self.refuses, self.taken, self.freed, self.errors = refuses, {}, [], []  # type: ignore[var-annotated]
        self.numbers = [(ctypes.c_float * 4)(*range(i, i + 4)) for i in (1, 5)]
        self.dims = (ctypes.c_int64 * 2)(2, 2)
        self.text = b"the call"
        functions = {"error_create": self.error, "error_message": self.message, "error_destroy": self.destroy,
                     "stream_get": self.stream, "memory_allocate": self.allocate, "memory_free": self.free}  # fmt: skip
        types = dict(xla.Api._fields_)
        made = {name: types[name](function) for name, function in functions.items()}  # type: ignore[operator]
        self.api = xla.Api.sized(version=xla.Version.sized(major=0, minor=3), **made)

    def call(self, handler: Any) -> Any:
        buffers = [xla.Buffer.sized(dtype=11, data=ctypes.addressof(n), rank=2, dims=self.dims) for n in self.numbers]
        given, made = (xla.Values.sized(size=1, values=(ctypes.POINTER(xla.Buffer) * 1)(ctypes.pointer(b))) for b in buffers)
        name, value = (xla.Span(ctypes.cast(ctypes.c_char_p(t), ctypes.c_void_p), len(t)) for t in (b"call", self.text))
        spans = [(ctypes.POINTER(xla.Span) * 1)(ctypes.pointer(span)) for span in (name, value)]
        attrs = xla.Attributes.sized(size=1, types=(ctypes.c_int * 1)(xla.STRING), names=spans[0], values=spans[1])
        frame = xla.Frame.sized(api=ctypes.pointer(self.api), ctx=5, stage=3, args=given, rets=made, attrs=attrs)
        return handler(ctypes.pointer(frame))

    def error(self, wanted: Any) -> int:
        self.errors.append((wanted.contents.code, wanted.contents.message.decode()))
        return 1000 + len(self.errors)

    def message(self, wanted: Any) -> None:
        assert wanted.contents.error == 999
        wanted.contents.message = self.refuses.encode()

    def destroy(self, wanted: Any) -> None:
        self.freed.append(wanted.contents.error)

    def stream(self, wanted: Any) -> None:
        assert wanted.contents.ctx == 5
        wanted.contents.stream = 77

    def allocate(self, wanted: Any) -> int | None:
        if self.refuses:
            return 999
        assert wanted.contents.alignment in (1, 2, 4, 8, 16), "XLA: unsupported alignment"
        memory = ctypes.create_string_buffer(wanted.contents.size + 512)
        address = -(-ctypes.addressof(memory) // 256) * 256 + self.offset
        self.taken[address] = memory, wanted.contents.size
        wanted.contents.data = address
        return None

    def free(self, wanted: Any) -> None:
        assert self.taken[wanted.contents.data][1] == wanted.contents.size
        self.freed.append(wanted.contents.data)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(xla, "_ordinal", lambda _: 3)
    return []


def test_a_call_on_a_gpu_has_xlas_stream_and_memory(seen: list[Any]) -> None:
    def run(text: str, where: Location, inputs: list[ArrayView], results: list[ArrayView], stream: int | None) -> None:
        (q,), (out,) = inputs, results
        workspace = q.owner.empty_view((3, 5), DTYPES["bf16"], "workspace")
        empty = q.owner.empty_view((0, 5), DTYPES["fp32"], "empty")
        assert (workspace.shape, workspace.strides, workspace.pointer % 256, empty.pointer) == ((3, 5), (5, 1), 0, 0)
        assert (q.shape, q.strides, q.dtype.name, str(q.location)) == ((2, 2), (2, 1), "fp32", "cuda:3")
        ctypes.memmove(out.pointer, q.pointer, 16)
        seen.extend([text, str(where), stream])

    fake = FakeXla()
    assert fake.call(xla.handler(run, "call", on_gpu=True)) is None
    assert seen == ["the call", "cuda:3", 77]
    assert list(fake.numbers[1]) == [1.0, 2.0, 3.0, 4.0]
    assert list(fake.taken) == fake.freed, "also each once"
    assert not fake.errors


def test_what_xla_refuses_is_reported_and_memory_is_given_back(seen: list[Any]) -> None:
    def run(text: str, where: Location, inputs: list[ArrayView], results: list[ArrayView], stream: int | None) -> None:
        inputs[0].owner.empty_view((4,), DTYPES["fp32"], "workspace")
        raise ValueError("after a workspace")

    fake = FakeXla()
    assert fake.call(xla.handler(run, "call", on_gpu=True)) == 1001
    assert fake.errors == [(xla.INVALID_ARGUMENT, "after a workspace")]
    assert list(fake.taken) == fake.freed
    full = FakeXla(refuses="out of memory")
    assert full.call(xla.handler(run, "call", on_gpu=True)) == 1001
    assert full.errors == [(xla.INTERNAL, "XLA: out of memory")]
    assert full.freed == [999], "the error"

"""attngen: a mini-compiler for attention.

    import attngen
    kernel = attngen.compile("specs/gpt2.attn")
    o = kernel(q, k, v)

`define` describes an attention in Python, `load` reads an `.attn` file, `compile` makes a callable of either, `attention` is
softmax(scale * q k^T + mask) v at once. The functions of the language (`where`, `exp`, `tanh`, ...) are here for masks and
scores written as Python functions. Everything is imported when first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.api import CompiledAttention, attention, compile, load
    from attngen.device.arrays import ArgumentError
    from attngen.device.protocol import CompilationError, DeviceError
    from attngen.diagnostics import DiagnosticError
    from attngen.language import define, to_text, traced
    from attngen.spec.attention import AttentionSpec

_HOME = {
    "ArgumentError": "attngen.device.arrays",
    "AttentionSpec": "attngen.spec.attention",
    "CompilationError": "attngen.device.protocol",
    "CompiledAttention": "attngen.api",
    "DeviceError": "attngen.device.protocol",
    "DiagnosticError": "attngen.diagnostics",
    "attention": "attngen.api",
    "compile": "attngen.api",
    "load": "attngen.api",
    "define": "attngen.language.python_spec",
    "to_text": "attngen.spec.print_attn",
    "traced": "attngen.language.python_spec",
}

__all__ = [
    "ArgumentError",
    "AttentionSpec",
    "CompilationError",
    "CompiledAttention",
    "DeviceError",
    "DiagnosticError",
    "attention",
    "compile",
    "define",
    "load",
    "to_text",
    "traced",
]


def __getattr__(name: str) -> Any:
    if name == "compile" and "torch" in sys.modules:
        import_module("attngen.torch")  # so that compiled specs are callables of tensors
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    from attngen.spec.operators import FUNCTIONS

    if name in FUNCTIONS:
        from attngen.language.trace import call

        return lambda *args: call(name, *args)
    raise AttributeError(f"module 'attngen' has no attribute {name!r}")

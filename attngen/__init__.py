"""attngen: a mini-compiler for attention.

    import attngen
    kernel = attngen.compile("gpt2")  # a shipped spec, or the path of an .attn file
    o = kernel(q, k, v)

`define` describes an attention in Python, `load` reads one from an `.attn` file, `compile` makes a callable of either,
`attention` is torch's scaled_dot_product_attention for arrays of any library. The functions of the language (`where`, `exp`,
`tanh`, ...) are here for masks and scores written as Python functions. Everything is imported on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.api import CompiledAttention as CompiledAttention
    from attngen.api import compile as compile
    from attngen.api import load as load
    from attngen.api import load_all as load_all
    from attngen.cache.disk_cache import CacheWarning as CacheWarning
    from attngen.device.arrays import ArgumentTypeError as ArgumentTypeError
    from attngen.device.emulated.findings import EmulationError as EmulationError
    from attngen.device.protocol import CompilationError as CompilationError
    from attngen.device.protocol import DeviceError as DeviceError
    from attngen.device.select import EmulatedDeviceWarning as EmulatedDeviceWarning
    from attngen.diagnostics import ArgumentError as ArgumentError
    from attngen.diagnostics import DiagnosticError as DiagnosticError
    from attngen.diagnostics import SpecWarning as SpecWarning
    from attngen.language import define as define
    from attngen.language import to_text as to_text
    from attngen.language import traced as traced
    from attngen.language.trace import TraceError as TraceError
    from attngen.plan import PlanRefusal as PlanRefusal
    from attngen.sdpa import attention as attention
    from attngen.spec.attention import AttentionSpec as AttentionSpec
    from attngen.spec.gradient import GradientError as GradientError
    from attngen.spec.obligations import ObligationError as ObligationError

__version__ = "0.1.0"

_HOME = {
    "ArgumentError": "attngen.diagnostics",
    "ArgumentTypeError": "attngen.device.arrays",
    "AttentionSpec": "attngen.spec.attention",
    "CacheWarning": "attngen.cache.disk_cache",
    "CompilationError": "attngen.device.protocol",
    "CompiledAttention": "attngen.api",
    "DeviceError": "attngen.device.protocol",
    "DiagnosticError": "attngen.diagnostics",
    "EmulatedDeviceWarning": "attngen.device.select",
    "EmulationError": "attngen.device.emulated.findings",
    "GradientError": "attngen.spec.gradient",
    "ObligationError": "attngen.spec.obligations",
    "PlanRefusal": "attngen.plan",
    "SpecWarning": "attngen.diagnostics",
    "TraceError": "attngen.language.trace",
    "attention": "attngen.sdpa",
    "compile": "attngen.api",
    "define": "attngen.language.python_spec",
    "load": "attngen.api",
    "load_all": "attngen.api",
    "to_text": "attngen.spec.print_attn",
    "traced": "attngen.language.python_spec",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in ("compile", "attention") and "torch" in sys.modules:
        import_module("attngen.torch")  # so that what these give and do is for tensors too
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    hint = ""
    if not name.startswith("_"):
        from attngen.language.prelude import functions, prelude

        if name in functions():
            from attngen.language.tracer import function_of

            return function_of(name)
        if name in prelude():
            hint = f": it reads s or indices, which a Python function has as arguments; write {prelude()[name].text}"
    raise AttributeError(f"module 'attngen' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    from attngen.language.prelude import functions

    modules = (name for name in globals() if f"attngen.{name}" in sys.modules)
    return sorted({"__doc__", "__file__", "__name__", "__path__", "__version__", *modules, *__all__, *functions()})

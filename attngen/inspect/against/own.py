"""What a user compares a spec with, found by its name: MODULE:FUNCTION, FILE.py:FUNCTION, two functions of FlexAttention, or
arrays in a file."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from attngen.diagnostics import ArgumentError

QUERIES = ("q", "query", "queries", "q_", "xq")  # names of the first argument of an attention
MODS = {5: "score", 4: "mask"}  # what FlexAttention calls a function of so many arguments
EXPECTED = "expected MODULE:FUNCTION, FILE.py:FUNCTION, FILE.py:SCORE_MOD,MASK_MOD, or a file .npz or .npy"
ARRAYS = ("q", "k", "v", "o")
Kind = Literal["attention", "mods", "arrays"]
Function = Callable[..., Any]  # somebody's, of any arguments


@dataclass(frozen=True)
class Own:
    """A user's attention. `functions` are one of (q, k, v, ...), or those of FlexAttention by "score" and "mask"; `values` are
    what the functions read under the name of an input, or the arrays of a file."""

    kind: Kind
    title: str
    functions: Mapping[str, Function]
    values: Mapping[str, Any]

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of the arguments of an attention beside q, k and v."""
        if self.kind != "attention":
            return ()
        return tuple(_parameters(self.functions["attention"]))[3:]

    @property
    def requires(self) -> tuple[str, ...]:
        """Those of `takes` that have no default."""
        found = _parameters(self.functions["attention"]) if self.kind == "attention" else {}
        return tuple(name for name in self.takes if found[name].default is inspect.Parameter.empty)


def own_of(text: str) -> Own:
    """The attention that `text` names. Raises ArgumentError with what to write instead."""
    if text.endswith((".npz", ".npy")):
        return Own("arrays", Path(text).name, {}, _arrays(Path(text)))
    place, colon, names = text.rpartition(":")
    if not colon or not place or not names:
        raise ArgumentError(f"--against {text}: {EXPECTED}")
    module = _module(place)
    found = [(name, _attribute(module, place, name)) for name in names.split(",")]
    kinds = {_kind(name, function): function for name, function in found}
    if len(kinds) != len(found) or ("attention" in kinds and len(found) > 1):
        raise ArgumentError(f"--against {text}: two functions are one of a score and one of a mask")
    values = _values_of(module, kinds.values())
    return Own("attention" if "attention" in kinds else "mods", names, kinds, values)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, or those of the .npy files q, k, v in the folder of an output. Raises ArgumentError."""
    if not path.is_file():
        raise ArgumentError(f"--against {path}: there is no such file")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
        else:
            files = {name: path.with_name(f"{name}.npy") for name in ("q", "k", "v")}
            found = {name: np.load(file, allow_pickle=False) for name, file in files.items() if file.is_file()}
            found["o"] = np.load(path, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise ArgumentError(f"--against {path}: {error}") from None
    missing = [name for name in ARRAYS if name not in found]
    if missing:
        where = "arrays called" if path.suffix == ".npz" else "beside it the files"
        raise ArgumentError(f"--against {path}: it has no {', '.join(missing)}; expected {where} q, k and v, and the output o")
    return found


def _module(place: str) -> ModuleType:
    """The module at a path, or of a name that Python imports from here. Raises ArgumentError."""
    path = Path(place)
    try:
        if path.suffix == ".py":
            if not path.is_file():
                raise ArgumentError(f"--against {place}: there is no such file")
            sys.path.insert(0, str(path.resolve().parent))
            name = f"attngen_against_{path.stem}"
            described = importlib.util.spec_from_file_location(name, path)
            assert described is not None
            assert described.loader is not None
            module = importlib.util.module_from_spec(described)
            sys.modules[name] = module
            described.loader.exec_module(module)
            return module
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    except ArgumentError:
        raise
    except ModuleNotFoundError as error:
        hint = f"; {place} is a name to import: for a file write {place}.py" if error.name == place.split(".")[0] else ""
        raise ArgumentError(f"--against {place}: {error}{hint}") from None
    except Exception as error:
        raise ArgumentError(f"--against {place} cannot be imported: {type(error).__name__}: {error}") from error


def _attribute(module: ModuleType, place: str, name: str) -> Function:
    found: object = module
    for part in name.strip().split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ArgumentError(f"--against {place}:{name}: it has no {part}{hint}")
        found = getattr(found, part)
    if inspect.isclass(found):
        raise ArgumentError(f"--against {place}:{name}: it is a class; name an instance, as of layer = {name}()")
    if not callable(found):
        raise ArgumentError(f"--against {place}:{name}: it is {type(found).__name__}, not a function")
    return found


def _parameters(function: Function) -> dict[str, inspect.Parameter]:
    """The parameters of a function; of a torch module, those of `forward`. Functions without a signature have q, k and v."""
    described = getattr(function, "forward", function)
    try:
        found = inspect.signature(described).parameters
    except (TypeError, ValueError):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return {name: inspect.Parameter(name, kind) for name in ("q", "k", "v")}
    return {n: p for n, p in found.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def _kind(name: str, function: Function) -> str:
    """Whether a function is an attention, or FlexAttention's score or mask, by its arguments. Raises ArgumentError."""
    parameters = _parameters(function)
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and p.kind is not p.KEYWORD_ONLY]
    first = next(iter(parameters), "").lower()
    if first in QUERIES or len(required) == 3:
        return "attention"
    if len(required) in MODS:
        return MODS[len(required)]
    takes = f"({', '.join(parameters)})"
    raise ArgumentError(
        f"--against {name} takes {takes}; expected an attention (q, k, v), or FlexAttention's (score, b, h, q_idx, kv_idx) or "
        "(b, h, q_idx, kv_idx)"
    )


def _values_of(module: ModuleType, functions: Iterable[Function]) -> dict[str, object]:
    """The values that functions may read by name: of their module, and those that they close over."""
    found = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    for function in functions:
        inner = getattr(function, "func", function)
        cells = getattr(inner, "__closure__", None) or ()
        names = getattr(getattr(inner, "__code__", None), "co_freevars", ())
        found |= {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
        found |= {n: v for n, v in vars(function).items() if not n.startswith("_")} if hasattr(function, "__dict__") else {}
    return found

"""The arguments of a call by name: params and captured inputs, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real

from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.spec.attention import AttentionSpec
from attngen.spec.dropout import RNG_STATE
from attngen.spec.expr import MAX_FLOAT, MAX_INT_PARAM, MAX_LENGTH, Type

Number = int | float

INFINITIES = (math.inf, -math.inf)


Declared = Mapping[str, tuple[str, Number | None]]  # params by name: (type, default)


def declared_params(spec: AttentionSpec) -> dict[str, tuple[str, Number | None]]:
    """The params of a spec as plain values, after the lengths that no sequence exceeds: of padded and paged keys, all for which
    there is room."""
    kernel = spec.kernel
    keys: Number | None = MAX_LENGTH if kernel.is_counted else None
    lengths = {name: ("int", keys if name == "max_kv_len" else None) for name in kernel.longest}
    return {**lengths, **{p.name: (str(p.type), p.default) for p in spec.params}}


def input_names(spec: AttentionSpec) -> tuple[str, ...]:
    """The arguments of a call that are arrays, beside q, k and v."""
    return (*spec.kernel.beginnings, *(i.name for i in spec.inputs))


def number_names(spec: AttentionSpec, kind: Type) -> tuple[str, ...]:
    """The arguments of a call that are numbers of a type."""
    lengths = spec.kernel.longest if kind is Type.INT else ()
    return (*lengths, *(p.name for p in spec.params if p.type is kind))


def named_arguments(
    inputs: Sequence[str], params: Declared, named: Mapping[str, object], captures: Mapping[str, object]
) -> tuple[list[object], dict[str, Number]]:
    """The inputs in order, from `captures` if a call does not name them, and every param's value.

    Raises ArgumentError for a name that is unknown, and for an input or a param that is missing or out of range.
    """
    refuse_unknown(list(named), [*inputs, *params])
    given = {**captures, **named}
    for name in inputs:
        if name == RNG_STATE.name and name not in given:
            raise ArgumentError("this attention has dropout; pass seed=..., and offset=... to tell calls apart")
        if name not in given:
            raise ArgumentError(f"input `{name}` was not given; pass {name}=...")
    return [given[name] for name in inputs], check_params(params, named)


def without_seed(inputs: Sequence[str], named: Mapping[str, object]) -> tuple[Mapping[str, object], tuple[int, int] | None]:
    """The named arguments without `seed` and `offset`, and these two (the offset is 0 by default), if the call says a seed and
    the attention has dropout.

    Raises ArgumentError for an offset without a seed, and a number of more than 64 bits.
    """
    if RNG_STATE.name not in inputs or not {"seed", "offset"} & named.keys():
        return named, None
    if "seed" not in named or RNG_STATE.name in named:
        raise ArgumentError("pass either seed=... and offset=..., or rng_state=..., an int64 array of both numbers")
    rest = {name: value for name, value in named.items() if name not in ("seed", "offset")}
    return rest, (signed("seed", named["seed"]), signed("offset", named.get("offset", 0)))


def signed(name: str, number: object) -> int:
    """A number of at most 64 bits as an int64 has it. Raises ArgumentError."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise ArgumentTypeError(f"`{name}` is {number!r}; expected an int")
    value = int(number)
    if not -(2**63) <= value < 2**64:
        raise ArgumentError(f"`{name}` is {_shown(value)}; expected a number of at most 64 bits")
    return value - 2**64 if value >= 2**63 else value


def check_params(declared: Declared, given: Mapping[str, object]) -> dict[str, Number]:
    """Every param's value: the given one, else its default.

    Raises ArgumentError for a param that is missing, of the wrong type or out of range.
    """
    values: dict[str, Number] = {}
    for name, (kind, default) in declared.items():
        value = given.get(name, default)
        if value is None and name not in given:
            raise ArgumentError(f"param `{name}` has no default and was not given; pass {name}=...")
        if not isinstance(value, (int, float)):  # numpy's numbers
            value = int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind == "int" and not isinstance(value, int)):
            raise ArgumentTypeError(f"param `{name}` is {value!r}; expected {'an int' if kind == 'int' else 'a number'}")
        limit = MAX_INT_PARAM if kind == "int" else MAX_FLOAT
        if abs(value) > limit and value not in INFINITIES:
            raise ArgumentError(f"param `{name}` is {_shown(value)}; expected at most {limit} in magnitude")
        values[name] = value
    return values


def _shown(value: Number) -> str:
    """A number in at most about 40 characters."""
    return str(value) if isinstance(value, float) or abs(value) < 10**40 else "a number of more than 40 digits"


def refuse_unknown(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises ArgumentError for the first name that is not in `known`."""
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(known) or 'none'}"
            raise ArgumentError(f"this attention has no input or param `{name}`; {hint}")

"""A problem of a check: its sizes, params and seed, and its setting, which is everything else that is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from attngen.diagnostics import counted
from attngen.reference.problems import USUAL, Array, Draw, Sample, Shape, sample
from attngen.reference.stored import Layout
from attngen.spec.attention import AttentionSpec
from attngen.spec.dtypes import nans

LAYOUTS: dict[Layout, str] = {
    "rows": "rows that are not aligned", "base": "an address that is not aligned", "columns": "columns that are not neighbours",
    "heads": "heads that are not aligned",
}  # fmt: skip
Spoils = Literal["", "dout", "row of dO", "row of Q", "row of K"]
SPOILED: dict[Spoils, str] = {
    "dout": "NaN in a row of dO",
    "row of dO": "a row of dO of NaN",
    "row of Q": "a row of Q of NaN",
    "row of K": "a row of K of NaN",
}


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the problems of a check are held to; None is chosen."""

    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    q_len: int | None = None
    kv_len: int | None = None
    params: Mapping[str, int | float] = field(default_factory=dict)
    free: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0

    @property
    def has_lengths(self) -> bool:
        """Whether a length is given: a check then runs one problem."""
        return self.q_len is not None or self.kv_len is not None


@dataclass(frozen=True, slots=True)
class Setting:
    """What a problem has beside its sizes, params and seed."""

    draw: Draw = USUAL  # the values of its arrays
    apart: bool = False  # each array has strides of its own: gaps lie between the rows (`stored.apart`)
    multiprocessors: int = 0  # how many the emulated device has, for persistent blocks and split keys; 0: its own
    sections: bool = False  # few heads are numbered together (`attngen.plan.heads_in_l2`)
    laid_out: tuple[str, Layout] | None = None  # an array by its name, and its layout (`stored.with_layout`)
    spoils: Spoils = ""  # where NaN is: the row in the middle; "dout": its ends in dO alone
    # rows and keys of each sequence, in packed, padded and paged storage; the shape has the longest
    lengths: tuple[tuple[int, int], ...] = ()
    page_size: int = 0  # rows; 0: the usual number
    wrong_lengths: bool = False  # some numbers are outside of the tensors (`stored.with_wrong_lengths`)

    def words(self) -> Iterator[str]:
        """What is not as in a usual problem."""
        if self.apart:
            yield "strides of its own for each array"
        if self.laid_out:
            name, layout = self.laid_out
            yield f"{LAYOUTS[layout]} of {name}"
        if self.sections:
            yield "few heads numbered together"
        if self.spoils:
            yield SPOILED[self.spoils]
        if self.lengths:
            yield "sequences of " + ", ".join(f"{rows} x {keys}" for rows, keys in self.lengths)
        if self.page_size:
            yield f"pages of {counted(self.page_size, 'row')}"
        if self.wrong_lengths:
            yield "lengths outside of the tensors"
        if self.draw.scores != "random":
            yield f"{self.draw.scores} scores"
        if self.multiprocessors:
            yield f"a device of {counted(self.multiprocessors, 'multiprocessor')}"
        if self.draw.magnitude != 1:
            yield f"Q times {self.draw.magnitude:g}"


NOTHING_SPECIAL = Setting()


@dataclass(frozen=True, slots=True)
class Trial:
    shape: Shape
    params: Mapping[str, int | float]
    seed: int = 0
    setting: Setting = NOTHING_SPECIAL

    def having(self, **changes: Any) -> Trial:
        """The same with another setting."""
        return replace(self, setting=replace(self.setting, **changes))

    def drawn(self, **changes: Any) -> Trial:
        """The same with other values."""
        return self.having(draw=replace(self.setting.draw, **changes))

    @property
    def problem_key(self) -> tuple[object, ...]:
        """Equal if the results are the same: trials may differ in how a kernel is launched."""
        setting = self.setting
        return self.shape, self.params, self.seed, setting.draw, setting.spoils, setting.lengths

    def problem(self, spec: AttentionSpec) -> Sample:
        return _spoiled(sample(spec, self.shape, self.seed, self.setting.draw), self.setting.spoils, spec)

    def describe(self, spec: AttentionSpec) -> str:
        """Sizes, params and setting in words, as `2 x 4 heads over 2, 129 rows, 33 keys, size 43`."""
        sizes = self.shape.sizes(spec)
        heads = f"{sizes['batch']} x {sizes['q_heads']} heads over {sizes['kv_heads']}"
        free = (f"{name} {sizes[name]}" for name in spec.free_dims)
        params = (f"{p.name} {self.params[p.name]}" for p in spec.params if p.name in self.params)
        return ", ".join((heads, f"{sizes['q_len']} rows", f"{sizes['kv_len']} keys", *free, *params, *self.setting.words()))


def spoiled_row(length: int) -> int:
    """The row of Q, K or dO that has NaN in a problem that spoils it."""
    return length // 2


def _spoiled(sample: Sample, spoils: Spoils, spec: AttentionSpec) -> Sample:
    """`sample` with NaN in Q or K."""
    if spoils not in ("row of Q", "row of K"):
        return sample
    array = sample.q if spoils == "row of Q" else sample.k
    place: Array = np.zeros(array.shape[:3], bool)
    place[:, :, spoiled_row(array.shape[2])] = True
    if spoils == "row of K":
        return replace(sample, k=with_nan_in_keys(spec, array, place))
    return replace(sample, q=with_nan(array, place))


def with_nan_in_keys(spec: AttentionSpec, k: Array, hidden: Array) -> Array:
    """`k` with NaN in the rows that are `hidden`, but not in columns that are V too: a weight of 0 times NaN is NaN where whole
    tiles are multiplied."""
    if spec.values is None:
        return with_nan(k, hidden)
    place = np.repeat(hidden[..., None], k.shape[-1], axis=-1)
    place[..., slice(*spec.values)] = False
    return with_nan(k, place)


def with_nan(array: Array, hidden: Array) -> Array:
    """`array` with NaN in the rows, or the elements, that are `hidden`."""
    if not hidden.any():
        return array
    found = array.copy()
    found[hidden] = nans((), array.dtype)
    return found

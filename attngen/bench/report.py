"""The results of a sweep as plain values, which can be stored and plotted anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from attngen.device.arrays import ArgumentError


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of a call: median, 10th and 90th percentile."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One candidate on one case. TFLOP/s count `operations_of_a_pair` for each pair that the mask keeps."""

    case: str
    dtype: str
    head_dim: int
    heads: str  # as the language writes them: 32, or 32 over 8
    masked: bool
    length: int
    candidate: str
    timing: Timing
    tflops: float
    of_matmul: float  # share of the matmul ceiling
    of_copy: float  # share of the copy ceiling, of the bytes that must move: each tensor once
    peak_bytes: int
    error: float | None  # against float64: the largest of O, or of the gradients relative to their largest; None: not measured


@dataclass(frozen=True, slots=True)
class Report:
    """A whole sweep, and where it ran."""

    spec: str
    where: str
    tokens: int  # batch times length, of every case whose length is not larger
    rounds: int
    results: tuple[Measured, ...]
    wanted: tuple[str, ...] = ()  # the gradients of a backward; none: a forward

    @property
    def what(self) -> str:
        """What a call computes."""
        return f"backward, gradients of {', '.join(self.wanted)}" if self.wanted else "forward"

    def to_json(self) -> dict[str, object]:
        """Plain values, as `from_json` reads them."""
        return asdict(self)


def from_json(data: Mapping[str, Any]) -> Report:
    """The report that `to_json` wrote. Raises ArgumentError for something else."""
    try:
        results = tuple(Measured(**r | {"timing": Timing(**r["timing"])}) for r in data["results"])
        wanted = tuple(data.get("wanted", ()))  # earlier versions measured forwards alone
        return Report(data["spec"], data["where"], data["tokens"], data["rounds"], results, wanted)
    except (KeyError, TypeError) as error:
        raise ArgumentError(f"this is not a report of `attngen bench` ({error})") from error

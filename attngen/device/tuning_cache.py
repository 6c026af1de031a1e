"""What `attngen tune` found: the fastest schedule of a variant on an architecture, for each bucket of sizes, on disk.

A variant is a spec's forward, or its backward with the gradients that it computes, in a fixed order or in any: each is tuned by
itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from attngen.cache.disk_cache import DiskCache, digest
from attngen.plan import Decision, Plan
from attngen.plan.facts import DETERMINISTIC
from attngen.spec.attention import AttentionSpec, KernelRequest
from attngen.spec.print_attn import to_text

CACHE = DiskCache("tuned")
Bucket = tuple[int, int]  # powers of 2: of the keys, and of the rows of all heads and batches


@dataclass(frozen=True, slots=True)
class Winner:
    """A schedule that was fastest, how long it took, and the planner's own choice beside it."""

    kernel: KernelRequest
    milliseconds: float
    planned_milliseconds: float
    where: str  # the GPU's name

    @property
    def decision(self) -> Decision:
        """The first decision of a plan with this schedule."""
        times = f"{self.milliseconds:.3f} ms, the planner's own choice {self.planned_milliseconds:.3f}"
        return Decision("tuned", "by `attngen tune`", f"{times}, on {self.where}")


def bucket_of(sizes: Mapping[str, int]) -> Bucket:
    """Problems whose sizes round up to the same powers of 2 share what was found."""
    rows = sizes["batch"] * sizes["q_heads"] * sizes["q_len"]
    return max(sizes["kv_len"] - 1, 0).bit_length(), max(rows - 1, 0).bit_length()


def is_open(spec: AttentionSpec, wanted: tuple[str, ...] = ()) -> bool:
    """Whether the spec leaves the tile of its schedule, if that has one, to be found: of its forward, or of a backward with the
    gradients `wanted`, which takes no tile from the spec."""
    return (spec.kernel.bare() if wanted else spec.kernel).is_planned


def remember(
    spec: AttentionSpec,
    arch: str,
    bucket: Bucket,
    winner: Winner,
    wanted: tuple[str, ...] = (),
    deterministic: bool = DETERMINISTIC,
) -> bool:
    """Keep `winner` for this variant and schedule, whatever it is called; whether it is kept now."""
    variant = _variant(spec, arch, winner.kernel.schedule, wanted, deterministic)
    return CACHE.keep(f"{variant}-{bucket[0]}-{bucket[1]}.json", json.dumps(asdict(winner)).encode())


def found_for(spec: AttentionSpec, plan: Plan) -> dict[Bucket, Winner]:
    """What was found for `spec` as `plan` computes it; nothing if there is nothing to tune."""
    is_tuned = plan.schedule.is_tiled and is_open(spec, plan.wanted)
    return remembered(spec, plan.arch.name, plan.keyword, plan.wanted, plan.facts.deterministic) if is_tuned else {}


def remembered(
    spec: AttentionSpec, arch: str, schedule: str, wanted: tuple[str, ...] = (), deterministic: bool = DETERMINISTIC
) -> dict[Bucket, Winner]:
    """What was found for this variant and schedule."""
    found: dict[Bucket, Winner] = {}
    known = _variant(spec, arch, schedule, wanted, deterministic)
    for entry in CACHE.entries():
        variant, _, bucket = entry.name.removesuffix(".json").partition("-")
        data = CACHE.find(entry.name) if variant == known else None
        if data is not None:
            with suppress(ValueError, KeyError, TypeError):  # written by another version of attngen
                fields = json.loads(data)
                keys, rows = map(int, bucket.split("-"))
                kernel = fields.pop("kernel", None) or fields.pop("schedule")  # the name in earlier versions
                found[keys, rows] = Winner(KernelRequest(*kernel.values()), **fields)
    return found


def _variant(spec: AttentionSpec, arch: str, schedule: str, wanted: tuple[str, ...], deterministic: bool) -> str:
    gradients = ("backward", *wanted, *(("deterministic",) if deterministic else ())) if wanted else ()
    return digest(to_text(replace(spec, name="tuned", kernel=spec.kernel.bare("auto"))), arch, schedule, *gradients)

"""What `attngen tune` found: the fastest schedule of a variant on an architecture, for each bucket of sizes, on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from attngen.device.kernel_cache import KernelCache, digest
from attngen.spec.attention import AttentionSpec, Schedule
from attngen.spec.print_attn import to_text

CACHE = KernelCache("tuned")
Bucket = tuple[int, int]  # powers of 2: of the keys, and of the rows of all heads and batches


@dataclass(frozen=True, slots=True)
class Winner:
    """A schedule that was fastest, how long it took, and the planner's own choice beside it."""

    schedule: Schedule
    milliseconds: float
    planned_milliseconds: float
    where: str  # the GPU's name


def bucket_of(sizes: Mapping[str, int]) -> Bucket:
    """Problems whose sizes round up to the same powers of 2 share what was found."""
    rows = sizes["batch"] * sizes["q_heads"] * sizes["q_len"]
    return max(sizes["kv_len"] - 1, 0).bit_length(), max(rows - 1, 0).bit_length()


def is_open(spec: AttentionSpec) -> bool:
    """Whether the spec leaves the schedule of a fused rung to be found."""
    return replace(spec.schedule, rung="auto") == Schedule() and spec.schedule.rung not in ("naive", "tiled")


def remember(spec: AttentionSpec, arch: str, bucket: Bucket, winner: Winner) -> bool:
    """Keep `winner` for this variant and rung, whatever it is called; whether it is kept now."""
    variant = _variant(spec, arch, winner.schedule.rung)
    return CACHE.keep(f"{variant}-{bucket[0]}-{bucket[1]}.json", json.dumps(asdict(winner)).encode())


def remembered(spec: AttentionSpec, arch: str, rung: str) -> dict[Bucket, Winner]:
    """What was found for this variant and rung."""
    found: dict[Bucket, Winner] = {}
    for entry in CACHE.entries():
        variant, _, bucket = entry.name.removesuffix(".json").partition("-")
        data = CACHE.find(entry.name) if variant == _variant(spec, arch, rung) else None
        if data is not None:
            with suppress(ValueError, KeyError, TypeError):  # written by another version of attngen
                fields = json.loads(data)
                keys, rows = map(int, bucket.split("-"))
                found[keys, rows] = Winner(**fields | {"schedule": Schedule(**fields["schedule"])})
    return found


def _variant(spec: AttentionSpec, arch: str, rung: str) -> str:
    return digest(to_text(replace(spec, name="tuned", schedule=Schedule())), arch, rung)

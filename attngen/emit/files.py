"""Which file each schedule has."""

from __future__ import annotations

from attngen.emit.file import File
from attngen.emit.fused_files import FusedMma, FusedSimt
from attngen.emit.hopper_files import FusedWgmma, Hopper
from attngen.emit.unfused_files import Naive, Tiled

FILES: dict[str, type[File]] = {
    "naive": Naive,
    "tiled": Tiled,
    "fused_simt": FusedSimt,
    "fused_mma": FusedMma,
    "wgmma": FusedWgmma,
    "hopper": Hopper,
}

"""The schedule `decode`: an object for products by mma.sync, and one for so many rows that wgmma suits."""

from attngen.plan.plan import WIDEST_HEAD, Schedule
from attngen.plan.register_table import PORTABLE, Measured
from attngen.schedules.decode import plan, registers, shown, wgmma_plan, wgmma_shown
from attngen.schedules.decode.context import Decode
from attngen.schedules.decode.wgmma_context import DecodeWgmma
from attngen.schedules.parts import wgmma
from attngen.schedules.parts.mma import NEEDED

DECODE = Schedule(
    name="decode",
    keyword="decode",
    summary="Few query rows and many keys, sm_80 and later: keys split over blocks, heads that share them in one tile.",
    propose=plan.propose,
    why_not=plan.why_not,
    largest_head=WIDEST_HEAD,
    types=plan.types,
    needs=NEEDED,
    tiles=plan.tiles,
    measured=Measured(
        registers.FAMILIES, lambda family: registers.KEYS, registers.specs_of, plan.of_family, PORTABLE, registers.as_spilled
    ),
    on_tensor_cores=True,
    packs_heads=True,
    emulated_ns=14,
    context=Decode,
    loops=shown.loops,
)

DECODE_WGMMA = Schedule(
    name="decode_wgmma",
    keyword="decode",
    summary="decode for latent attention with 64 rows or more for each key head: two warpgroups multiply by wgmma in turn.",
    propose=wgmma_plan.propose,
    why_not=wgmma_plan.why_not,
    types=wgmma_plan.types,
    largest_head=WIDEST_HEAD,
    needs=wgmma.NEEDED,
    tiles=wgmma_plan.tiles,
    on_tensor_cores=True,
    by_tma=True,
    packs_heads=True,
    emulated_ns=7,
    context=DecodeWgmma,
    loops=wgmma_shown.loops,
)

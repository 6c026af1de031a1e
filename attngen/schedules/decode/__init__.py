"""The schedule `decode` as one object."""

from attngen.plan.plan import WIDEST_HEAD, Schedule
from attngen.plan.register_table import PORTABLE, Measured
from attngen.schedules.decode import plan, registers, shown
from attngen.schedules.decode.context import Decode
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

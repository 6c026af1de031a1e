"""The schedule `naive`, as one object."""

from attngen.plan.plan import WIDEST_HEAD, Schedule, any_types
from attngen.schedules.naive import plan, shown
from attngen.schedules.naive.context import Naive

NAIVE = Schedule(
    name="naive",
    keyword="naive",
    summary="The textbook: three plain kernels with the scores in global memory, a thread per output element.",
    largest_head=WIDEST_HEAD,
    types=any_types,
    propose=plan.propose,
    is_tiled=False,
    is_fused=False,
    output_columns=1,
    emulated_ns=28,
    context=Naive,
    loops=shown.loops,
)

"""The backward of the schedule `naive`, as one object."""

from attngen.plan.plan import WIDEST_HEAD, Schedule
from attngen.schedules.naive import backward_plan, backward_shown
from attngen.schedules.naive.backward_context import NaiveBackward

NAIVE_BACKWARD = Schedule(
    name="naive_backward",
    keyword="naive",
    direction="backward",
    summary="The textbook of gradients: a plain kernel for each equation, a thread per element of each gradient.",
    largest_head=WIDEST_HEAD,
    propose=backward_plan.propose,
    is_tiled=False,
    is_fused=False,
    emulated_ns=70,
    context=NaiveBackward,
    loops=backward_shown.loops,
)

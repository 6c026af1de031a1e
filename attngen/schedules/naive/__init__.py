"""The schedule `naive` and its backward, each as one object."""

from attngen.plan.plan import EVERY_STORAGE, WITHOUT_CACHES, Schedule
from attngen.schedules.naive import backward_plan, backward_shown, plan, shown
from attngen.schedules.naive.backward_context import NaiveBackward
from attngen.schedules.naive.context import Naive

NAIVE = Schedule(
    name="naive",
    keyword="naive",
    summary="The textbook: three plain kernels with the scores in global memory, a thread per output element.",
    propose=plan.propose,
    is_tiled=False,
    is_fused=False,
    storages=EVERY_STORAGE,
    context=Naive,
    loops=shown.loops,
    timeline=shown.timeline,
)

NAIVE_BACKWARD = Schedule(
    name="naive_backward",
    keyword="naive",
    direction="backward",
    summary="The textbook of gradients: a plain kernel for each equation, a thread per element of each gradient.",
    propose=backward_plan.propose,
    is_tiled=False,
    is_fused=False,
    storages=WITHOUT_CACHES,
    context=NaiveBackward,
    loops=backward_shown.loops,
    timeline=backward_shown.timeline,
)

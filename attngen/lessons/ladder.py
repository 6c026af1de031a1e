"""Lesson kernels of a spec: which specs have them, their text, and how they differ."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from attngen.diagnostics import ArgumentError
from attngen.emit.comment_text import backward_equations, equations
from attngen.emit.comments import strip_comments
from attngen.emit.cuda_text import literal
from attngen.emit.emitter import emit, environment
from attngen.keywords import PORTABLE_SCHEDULES
from attngen.lessons.backward import BACKWARD
from attngen.lessons.decoding import DECODING
from attngen.lessons.forward import FORWARD
from attngen.lessons.step import Ladder, Step
from attngen.plan import ARCHES
from attngen.plan.head_scale import with_head_scale
from attngen.puzzles.folder import with_primitives
from attngen.schedules import choose
from attngen.spec.attention import AttentionSpec
from attngen.spec.expr import Const, names_in
from attngen.spec.gradient import QKV, gradient_of

LADDERS = {ladder.name: ladder for ladder in (FORWARD, BACKWARD, DECODING)}
SEEN = {"s", "q", "k", "h", "q_len", "kv_len"}  # what masks and scores may read
_FUNCTION = re.compile(
    r"^(?:// [^\n]*\n)*__device__ __forceinline__ (?:bool|float) (mask|score|score_derivative)\((.*?)\) \{\n.*?^}\n",
    re.M | re.S,
)
NOTHING = {"mask": "true", "score": "s", "derivative": ""}


def why_not(spec: AttentionSpec, ladder: Ladder) -> str:
    """Why a ladder has no kernels of a spec; empty if it has."""
    if spec.dtype.name not in ("fp16", "bf16") or len({dtype.name for dtype in spec.dtypes.values()}) > 1:
        return "they are of fp16 or bf16"
    if spec.head_dim != spec.head_dim_v or spec.head_dim not in ladder.heads:
        *others, last = map(str, ladder.heads)
        return f"heads have {', '.join(others)} or {last} elements, of K and V alike"
    if spec.inputs or spec.params:
        return "they read no captured tensors and no params"
    if spec.normalize != "softmax" or spec.sink is not None or spec.dropout is not None or spec.rotary is not None or spec.lse:
        return "they have a plain softmax, without a sink, dropout or rotation, and do not return lse"
    if not isinstance(spec.scale, Const) or with_head_scale(spec) is not spec:
        return "the scale is a number, the same for all heads"
    if others := sorted(names_in(spec.score, *([spec.mask] if spec.mask else [])) - SEEN):
        return f"masks and scores read {', '.join(sorted(SEEN))} alone, not {', '.join(others)}"
    return ""


@dataclass(frozen=True, slots=True)
class Rung:
    """A step of one spec: `text` is the file, `own` the same without primitives."""

    ladder: Ladder
    step: Step
    spec: AttentionSpec
    own: str
    text: str

    @property
    def name(self) -> str:
        of = "" if self.ladder is FORWARD else f"{self.ladder.name}_"
        return f"{self.spec.name}_{of}{self.step.number}_{self.step.name}"

    def changed(self, before: Rung) -> tuple[int, int]:
        """Lines of code that `before` has and this one has not, and the other way round: without comments and primitives."""
        old, new = (_code(rung.own) for rung in (before, self))
        marks = [line[:2] for line in difflib.ndiff(old, new)]
        return marks.count("- "), marks.count("+ ")


def _code(text: str) -> list[str]:
    return [line.rstrip() for line in strip_comments(text).splitlines() if line.strip()]


def rungs(spec: AttentionSpec, ladder: Ladder = FORWARD) -> tuple[Rung, ...]:
    """All steps of a spec. Raises ArgumentError if the ladder has no kernels of it."""
    reason = why_not(spec, ladder)
    if reason:
        raise ArgumentError(
            f"{ladder.title} has no kernels of {spec.name}: {reason}; `attngen diff` compares schedules of any spec"
        )
    functions, calls = _variant(spec, ladder)
    assert isinstance(spec.scale, Const)
    gives = equations(spec, False) if ladder is not BACKWARD else backward_equations(spec, gradient_of(spec), QKV)
    names = {"spec": spec, "t": spec.dtype.name, "functions": functions, "scale": literal(spec.scale)[0], **calls}
    found = []
    products_of = {step: [replace(one, dtype=spec.dtype.name) for one in step.products] for step in ladder.steps}
    for step in (step for step in ladder.steps if spec.head_dim in (step.heads or ladder.heads)):
        template = environment().get_template(f"ladder/{ladder.name}/{step.number}_{step.name}.cu.j2")
        own = re.sub(r"\n{3,}", "\n\n", template.render(ladder=ladder, step=step, equations=gives, **names))
        found.append(Rung(ladder, step, spec, own, with_primitives(own, products_of[step])))
    return tuple(found)


def _variant(spec: AttentionSpec, ladder: Ladder) -> tuple[str, dict[str, str]]:
    """The functions of mask and score as the simplest schedule has them, and how they are called."""
    arch, simplest = ARCHES[ladder.steps[0].arch], PORTABLE_SCHEDULES[0]
    if ladder is BACKWARD:
        plan = choose(spec, arch, simplest, direction="backward", wanted=QKV)
    else:
        plan = choose(spec, arch, simplest)
    texts, calls = [], dict(NOTHING)
    for found in _FUNCTION.finditer(emit(spec, plan).text):
        texts.append(found[0])
        call = f"{found[1]}({', '.join(argument.split()[-1] for argument in found[2].split(', '))})"
        calls |= {"derivative": f" * {call}"} if found[1] == "score_derivative" else {found[1]: call}
    return "\n".join(texts).rstrip(), calls

"""Templates are read by people: few conditions, and none nested deeper than two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import nodes

from attngen.emit.emitter import environment
from attngen.emit.templates import template_directory
from attngen.emit.variant import build_variant
from attngen.language import load_text
from attngen.plan import ARCHES
from attngen.plan.plan import PlanRefusal
from attngen.schedules import choose
from attngen.spec.gradient import QKV
from tests.harness import shipped

WIDTH = 140  # characters of a line
TAG = re.compile(r"\{%-?\s*(if|endif)\b")
TAGS, CONDITION = re.compile(r"\{[%{].*?[%}]\}", re.S), re.compile(r"\b(?:if|elif)\b")
MOST_CONDITIONS = 1000  # in all templates; a choice that many make is a file of names, which the context selects
TEMPLATES = template_directory()
FILES = sorted(path for path in TEMPLATES.rglob("*") if path.suffix in (".j2", ".cuh", ".hpp"))


def depths(text: str) -> list[tuple[int, int]]:
    """The line and the depth of each condition."""
    found, depth = [], 0
    for number, line in enumerate(text.splitlines(), 1):
        for tag in TAG.findall(line):
            depth += 1 if tag == "if" else -1
            if tag == "if":
                found.append((number, depth))
    assert depth == 0
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TEMPLATES)))
def test_no_condition_is_nested_deeper_than_two(path: Path) -> None:
    deep = [line for line, depth in depths(path.read_text()) if depth > 2]
    assert not deep, f"lines {deep}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TEMPLATES)))
def test_no_line_is_too_long(path: Path) -> None:
    assert not [number for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > WIDTH]


def test_conditions_are_few() -> None:
    """In tags and within lines; what often has the same answer is asked once (docs/architecture.md)."""
    texts = (path.read_text() for path in FILES if path.suffix == ".j2")
    assert sum(len(CONDITION.findall(tag)) for text in texts for tag in TAGS.findall(text)) <= MOST_CONDITIONS


def test_depths_are_counted() -> None:
    assert depths("{% if a %}\n{% if b %}{% endif %}\n{%- if c %}{% endif %}{% endif %}") == [(1, 1), (2, 2), (3, 2)]


ROTARY = """attention rotary {
    dtype bf16
    head_dim 64
    input cosines: fp32[positions, 32]
    input sines: fp32[positions, 32]
    rotary 64 halves by cosines, sines
}"""


@pytest.mark.parametrize("wanted", [(), QKV], ids=["forward", "backward"])
@pytest.mark.parametrize("schedule", ["naive", "tiled", "fused", "decode", "wgmma", "hopper"])
def test_no_name_of_a_kernel_hides_one_of_its_context(schedule: str, wanted: tuple[str, ...]) -> None:
    """A name set at the top of a kernel's template holds in all that it includes: it would hide what Python says there."""
    specs = [*(shipped(name) for name in ("alibi", "packed_documents", "dropout", "dense_bias")), *load_text(ROTARY)]
    for spec in specs:
        try:
            plan = choose(spec, ARCHES["sm_90a"], schedule, wanted=wanted)
        except PlanRefusal:
            continue  # decode and wgmma have no backward, decode no dropout
        kernel = (TEMPLATES / f"kernels/{plan.schedule.name}.cu.j2").read_text()
        context = plan.schedule.context(spec, plan, build_variant(spec, plan)).context()
        hidden = {name for name in set_at_the_top(kernel) if name in context}
        assert not hidden


@pytest.mark.parametrize("path", sorted(TEMPLATES.rglob("*.j2")), ids=lambda path: str(path.relative_to(TEMPLATES)))
def test_no_macro_has_the_name_of_a_type_of_tensors_or_a_plan(path: Path) -> None:
    """Macros of a file that another imports would hide these there."""
    macros = {node.name for node in environment().parse(path.read_text()).find_all(nodes.Macro)}
    assert not macros & {"types", "plan", "own", "variant", "kernels", "text", "T"}


def set_at_the_top(template: str) -> set[str]:
    """The names that a template sets outside of macros, in conditions too."""
    todo, names = [*environment().parse(template).body], set()
    while todo:
        node = todo.pop()
        if isinstance(node, nodes.If):
            todo += [*node.body, *node.elif_, *node.else_]
        if isinstance(node, nodes.Assign | nodes.AssignBlock):
            names |= {name.name for name in (node, *node.find_all(nodes.Name)) if getattr(name, "ctx", "") == "store"}
    return names


def test_names_set_at_the_top_are_found() -> None:
    template = "{% set a, b = 1, c %}{% if a %}{% set d = a %}{% endif %}{% macro m() %}{% set e = 1 %}{% endmacro %}"
    assert set_at_the_top(template) == {"a", "b", "d"}

"""A choice of a schedule, said once: a field of its own plan with its title, the words for its value, and the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields
from typing import Any

from attngen.plan.facts import SpecFacts
from attngen.plan.own import Own
from attngen.plan.plan import Decision

Words = tuple[str, str]  # a value in words, and the reason for it


def choice(title: str, words: Mapping[Any, Words] | Callable[[Any, SpecFacts], Words | None], **more: Any) -> Any:
    """A field whose value is a decision: `words` by value, or of the plan and the facts of its spec. Values without words are
    those that need none. `more` are arguments of `dataclasses.field`."""
    return field(metadata={"title": title, "words": words}, **more)


def decided(own: Own, facts: SpecFacts, *names: str) -> Iterator[Decision]:
    """The decisions of a schedule's own plan: of the fields `names`, in this order, or of all."""
    declared = {f.name: f.metadata for f in fields(own) if f.metadata}
    for name in names or declared:
        title, words = declared[name]["title"], declared[name]["words"]
        found = words.get(getattr(own, name)) if isinstance(words, Mapping) else words(own, facts)
        if found is not None:
            yield Decision(title, *found)

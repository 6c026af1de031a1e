"""A kernel as its template sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from attngen.emit import comment_text
from attngen.emit.program import KernelEntry, Parameter, Tensor


@dataclass(frozen=True, slots=True)
class SignatureLine:
    """One line of a kernel's signature: parameters that belong together with what follows them, and what they are."""

    text: str
    comment: str


@dataclass(frozen=True, slots=True)
class KernelText:
    """A kernel as its template sees it."""

    entry: KernelEntry
    signature: tuple[SignatureLine, ...]
    threads: str  # as the launch bounds say it: a constant's name or a number

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def reads_captured(self) -> bool:
        """Whether captured values are among its parameters."""
        return any(p.is_captured for p in self.entry.parameters)


def signature_lines(entry: KernelEntry, tensors: Mapping[str, Tensor]) -> tuple[SignatureLine, ...]:
    """The lines of a kernel's signature: parameters that belong together share one."""
    lines: list[SignatureLine] = []
    group: list[Parameter] = []

    def flush() -> None:
        if group:
            what = group[0].formula.words if group[0].formula else ""
            lines.extend(
                SignatureLine(line, what) for line in comment_text.wrapped_list([f"{p.ctype} {p.name}" for p in group])
            )
            group.clear()

    for p in entry.parameters:
        if p.binding == "data":
            flush()
            restrict = " __restrict__" if p.ctype.startswith("const ") else ""
            lines.append(SignatureLine(f"{p.ctype}{restrict} {p.name}", comment_text.shape_text(tensors[p.of])))
        else:
            if group and _line_of(group[-1]) != _line_of(p):
                flush()
            group.append(p)
    flush()
    ends = [","] * (len(lines) - 1) + [")"]
    return tuple(replace(line, text=line.text + end) for line, end in zip(lines, ends, strict=True))


def _line_of(parameter: Parameter) -> tuple[str, str]:
    """What parameters on one line of a signature have in common."""
    return parameter.binding, parameter.of if parameter.binding in ("stride", "step") else ""

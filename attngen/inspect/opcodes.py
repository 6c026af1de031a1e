"""SASS instructions by the unit that executes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

# (class, a pattern of its opcodes up to the first dot); the first match counts. Names: CUDA Binary Utilities, "Instruction Set
# Reference".
CLASSES: tuple[tuple[str, str], ...] = (
    ("tensor cores", r"[HIDQBO]G?MMA|UTC\w*MMA"),
    ("global to shared", r"LDGSTS|UTMALDG|UBLKCP"),
    ("shared memory", r"LDSM?|STSM?|ATOMS|UTMASTG"),
    ("global memory", r"LDG?|STG?|ATOMG?|U?RED|CCTL"),
    ("local memory", r"LDL|STL"),
    ("special functions", r"MUFU"),
    ("conversions", r"F2\w+|U?I2\w+|FRND"),
    ("fp32", r"F(ADD|MUL|FMA|SEL|SET|SETP|MNMX|CHK|SWZADD)\w*"),
    ("fp16", r"H(ADD|MUL|FMA|SET|SETP|MNMX)2\w*"),
    ("between threads", r"SHFL|U?VOTEU?|C?REDUX|MATCH|ELECT|ENDCOLLECTIVE"),
    ("barriers", r"BAR|B2R|SYNCS|\w*CGABAR\w*|(LDG)?DEPBAR|ARRIVES|WARPSYNC|MEMBAR|ERRBAR|FENCE|WARPGROUP|USETMAXREG|UTMA\w+"),
    ("constants", r"U?LDCU?"),
    ("moves", r"U?MOV|MOVM|CS2U?R|S2U?R|R2UR|P2R|R2P|U?PRMT|U?SEL|IMAD\.MOV"),
    ("integer", r"U?(I(MAD|ADD|MNMX|ABS|DP|SETP|MUL)|LEA|LOP|SHF|SH[LR]|BREV|POPC|FLO|BMSK|SGXT|PLOP)\w*|U?VI\w+|VABSDIFF\w*"),
    ("control", r"U?BRA|BRX|JMP|EXIT|RET|CALL|BSSY|BSYNC|BREAK|BMOV|BPT|NOP|YIELD|NANOSLEEP|PREEXIT|ACQBULK|KILL"),
)
OTHER = "other"
_PATTERNS = [(name, re.compile(rf"(?:{pattern})(?![A-Z0-9])")) for name, pattern in CLASSES]
_OPCODE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


def opcode(instruction: str) -> str:
    """The opcode of a line of SASS with its modifiers; empty if there is none."""
    found = _OPCODE.match(instruction)
    return found[1] if found else ""


def class_of(instruction: str) -> str:
    """The class of a line of SASS, one of CLASSES or OTHER."""
    name = opcode(instruction)
    return next((kind for kind, pattern in _PATTERNS if pattern.match(name)), OTHER)


def histogram(instructions: Iterable[str]) -> dict[str, int]:
    """The number of instructions of each class that occurs, in the order of CLASSES."""
    counts = Counter(map(class_of, instructions))
    return {name: counts[name] for name in (*(name for name, _ in CLASSES), OTHER) if counts[name]}

"""Everything in an emitted file that orders or bounds what it does, each of which can be taken away: barriers, waits, arrivals
and fences; guards; bounds.

Found by reading the file's tokens, not by a list of names: a function that waits for something, anywhere in the functions that
it calls, is one whose calls are removed. A removal that the language does not permit, such as of a constant expression, is not
one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

# For the emulated device: `attngen_left_out` is the number of the removal, and is read at each place.
CHOSEN = """\
extern "C" { int attngen_left_out = -1; }
__attribute__((no_sanitize("thread"))) static int attngen_removal() { return attngen_left_out; }
static bool left_out(int number) { return attngen_removal() == number; }
static int further(int number) { return left_out(number); }
template <int NUMBER, typename T> inline bool chosen(T condition) {
    const int by = attngen_removal() - NUMBER;
    return by == 0 ? true : by == 1 ? false : bool(condition);
}
template <int NUMBER, typename T> inline bool passed(T condition) { return left_out(NUMBER) || bool(condition); }
template <int NUMBER, typename T> inline bool kept(T condition) { return !left_out(NUMBER) && bool(condition); }
#define BUT(name)                                                                                 \
    template <int NUMBER, typename A, typename B> inline auto name##_but(A a, B b) {              \
        decltype(name(a, b)) bounded = name(a, b);                                                \
        const int by = attngen_removal() - NUMBER;                                                \
        return by == 0 ? a : by == 1 ? b : bounded;                                               \
    }
BUT(min) BUT(max)
#undef BUT
#line 1
"""

ORDERS = "barrier, wait, arrival or fence"
GUARD, BOUND, LOOP = "guard", "bound", "loop end"

_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|\#[^\n]*(?:\\\n[^\n]*)*|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\''
    r"|[A-Za-z_]\w*|\.?\d(?:[\w.]|(?<=[eEpP])[+-])*|->|::|<<=|>>=|&&|\|\||[<>=!+\-*/%&|^]=|\+\+|--|[^\w\s]",
    re.DOTALL,
)
# What PTX instructions that order something begin with or contain
_ORDERING = re.compile(
    r"\b(?:bar|barrier|mbarrier|membar|fence|griddepcontrol|setmaxnreg)\.|\b\w*(?:fence|commit_group|wait_group)\b|wgmma\.fence"
)
_INTRINSIC = re.compile(r"__sync\w+|__threadfence\w*")
_KEYWORDS = {
    "if",
    "for",
    "while",
    "switch",
    "return",
    "sizeof",
    "alignas",
    "static_assert",
    "decltype",
    "asm",
    "constexpr",
    "else",
}
ASSIGNS = ("+=", "-=", "*=", "/=", "|=", "&=", "^=", "<<=", ">>=", "%=")
_PAIRS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing that is taken away. `what` says how: a statement is left out; a guard is always true, or never; a bound is its
    first or its second operand; a loop ends one later."""

    start: int  # in the text: of the statement, the condition, the call of min or max
    end: int
    kind: str
    what: str

    def line(self, text: str) -> int:
        return text.count("\n", 0, self.start) + 1

    def lines(self, text: str) -> tuple[str, str]:
        """The three lines before its own, and its own."""
        lines, own = text.splitlines(), self.line(text) - 1
        return "\n".join(lines[max(0, own - 3) : own]), lines[own]

    def statement(self, text: str) -> str:
        """What is changed, on one line, without comments."""
        code = re.sub(r"//[^\n]*|^\s*#[^\n]*", "", text[self.start : self.end], flags=re.M)
        return re.sub(r"\s+", " ", code).strip()

    def describe(self, text: str) -> str:
        return f"{self.statement(text)}: {self.what}"


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Insertion:
    at: int
    rank: int  # order of insertions at one place: closing parts first, then opening ones from the outermost on
    text: str
    skips: int = 0  # characters of the text that it takes the place of


class Emitted:
    """The text of an emitted file: its tokens, functions, and removals."""

    def __init__(self, text: str) -> None:
        self.text = text
        found = (Token(m[0], m.start()) for m in _TOKEN.finditer(text))
        self.tokens = [t for t in found if not t.text.startswith(("//", "/*", "#"))]
        self.closing = self._matched()
        self.opening = {close: opened for opened, close in self.closing.items()}
        self.enclosing = self._enclosing()
        self.insertions: list[Insertion] = []
        self.removals: list[Removal] = []
        self.constants = self._marked(self._constant_places())
        self._find()

    # --- the structure of the text

    def _matched(self) -> dict[int, int]:
        """The closing bracket of each opening one, by their places among the tokens."""
        found, stack = {}, []
        for i, token in enumerate(self.tokens):
            if token.text in _PAIRS:
                stack.append(i)
            elif token.text in _PAIRS.values():
                opened = stack.pop()
                assert _PAIRS[self.tokens[opened].text] == token.text, self.text[token.start - 40 : token.start + 40]
                found[opened] = i
        assert not stack
        return found

    def _enclosing(self) -> list[int]:
        """The innermost opening bracket around each token; -1 for none."""
        found, stack = [], [-1]
        for i, _ in enumerate(self.tokens):
            if i in self.opening:
                stack.pop()
            found.append(stack[-1])
            if i in self.closing:
                stack.append(i)
        return found

    def is_(self, i: int, *texts: str) -> bool:
        return 0 <= i < len(self.tokens) and self.tokens[i].text in texts

    def _constant_places(self) -> list[tuple[int, int]]:
        """Tokens of constant expressions, of PTX, and of declarations of types; as ranges."""
        ranges: list[tuple[int, int]] = []
        for i, token in enumerate(self.tokens):
            if token.text in ("constexpr", "static_assert", "using", "enum") and not any(a <= i < b for a, b in ranges[-1:]):
                if self.is_(i - 1, "if"):  # if constexpr (...): the condition alone
                    ranges.append((i, self.closing[i + 1] + 1))
                    continue
                end = i
                while not self.is_(end, ";"):
                    if self.is_(end, "{") and not self.is_(end - 1, "=", ",", "("):  # the body of a function, or of an enum
                        end = self.closing[end]
                        break
                    end = self.closing.get(end, end) + 1
                ranges.append((i, end + 1))
            if token.text == "asm":
                opened = i + 1 if self.is_(i + 1, "(") else i + 2
                ranges.append((i, self.closing[opened] + 1))
        return ranges

    def _marked(self, ranges: Iterable[tuple[int, int]]) -> list[bool]:
        """Whether each token is in one of the ranges."""
        marks = [False] * len(self.tokens)
        for first, end in ranges:
            marks[first:end] = [True] * (min(end, len(marks)) - first)
        return marks

    @cached_property
    def bodies(self) -> list[tuple[str, int, int]]:
        """The functions and named lambdas: name, and the tokens of the body. Of a constructor, with its initializers."""
        found = []
        for i, token in enumerate(self.tokens):
            if token.text != "(" or not re.fullmatch(r"[A-Za-z_]\w*", self.tokens[i - 1].text):
                continue
            name, after = self.tokens[i - 1].text, self.closing[i] + 1
            if name in _KEYWORDS or name.startswith("__") or self.is_(i - 2, ".", "->"):
                continue
            while self.is_(after, "const", "noexcept"):
                after += 1
            if self.is_(after, ":") and not self.is_(i - 2, "?"):
                while not (self.is_(after, "{") and self.is_(after - 1, ")", "}")):
                    if self.is_(after, ";"):
                        break
                    after = self.closing.get(after, after) + 1
            if self.is_(after, "{"):
                found.append((name, after, self.closing[after]))
        for i, token in enumerate(self.tokens):  # NAME = [...](...) {...}
            if token.text == "=" and self.is_(i + 1, "["):
                after = self.closing[i + 1] + 1
                after = self.closing[after] + 1 if self.is_(after, "(") else after
                if self.is_(after, "{"):
                    found.append((self.tokens[i - 1].text, after, self.closing[after]))
        return found

    @cached_property
    def ordering(self) -> frozenset[str]:
        """The names of functions that order something, themselves or by what they call."""
        calls: dict[str, set[str]] = {}
        known: set[str] = set()
        for name, first, last in self.bodies:
            called = {self.tokens[n].text for n in range(first, last) if self.is_(n + 1, "(", "<")}
            calls.setdefault(name, set()).update(called)
            if any(map(_INTRINSIC.fullmatch, called)) or any(map(_ORDERING.search, self._ptx(first, last))):
                known.add(name)
        while more := {name for name, called in calls.items() if called & known} - known:
            known |= more
        return frozenset(known)

    def _ptx(self, first: int, last: int) -> Iterator[str]:
        """The text of each asm statement between two tokens."""
        for n in range(first, last):
            if self.is_(n, "asm"):
                opened = n + 1 if self.is_(n + 1, "(") else n + 2
                strings = (t.text[1:-1] for t in self.tokens[opened : self.closing[opened]] if t.text[0] == '"')
                yield " ".join(strings)

    @cached_property
    def namespaces(self) -> list[tuple[str, int, int]]:
        """The named namespaces: name, and the tokens of the body."""
        names = (i for i in range(1, len(self.tokens)) if self.is_(i - 1, "namespace") and self.is_(i + 1, "{"))
        return [(self.tokens[i].text, i + 1, self.closing[i + 1]) for i in names]

    def functions_of(self, removal: Removal) -> list[str]:
        """The functions around a removal, the innermost first, and the namespace around these."""
        around = [
            (last - first, name)
            for name, first, last in (*self.bodies, *self.namespaces)
            if self.tokens[first].start < removal.start < self.tokens[last].start
        ]
        return [name for _, name in sorted(around)]

    # --- what can be taken away

    def _find(self) -> None:
        inside = self._marked((first + 1, last) for _, first, last in self.bodies)
        for i in range(len(self.tokens)):
            if self.constants[i] or not inside[i]:
                continue
            self._statement(i)
            self._valued(i)
            self._condition(i)
            self._ternary(i)
            self._operand(i)
            self._stored_condition(i)
            self._bound(i)
        order = sorted(range(len(self.removals)), key=lambda n: (self.removals[n].start, n))
        self.removals = [self.removals[n] for n in order]
        self._numbers = {old: new for new, old in enumerate(order)}

    def _add(self, first: int, last: int, kind: str, *whats: str) -> int:
        """Removals of the tokens from `first` to `last`; the number of the first of them."""
        start, end = self.tokens[first].start, self.tokens[last].end
        self.removals += [Removal(start, end, kind, what) for what in whats]
        return len(self.removals) - len(whats)

    def _around(self, first: int, last: int, call: str) -> None:
        """Puts `call(` and `)` around tokens."""
        opening = call if call.endswith(" ") else f"{call}("
        self.insertions.append(Insertion(self.tokens[first].start, 2 * (len(self.tokens) - (last - first)), opening))
        self.insertions.append(Insertion(self.tokens[last].end, -1, ")"))

    def _statement(self, i: int) -> None:
        """A call of a function that orders something, as a statement of its own."""
        if not self.is_(self.enclosing[i], "{"):  # in the head of a `for`
            return
        if not self.is_(i - 1, ";", "{", "}", ")", "else") or not re.match(r"[A-Za-z_:]", self.tokens[i].text):
            return
        if self.is_(i - 1, ")") and not self._is_head(i - 1):
            return
        end, called = i, ""
        while not self.is_(end, "(", ";", "{", "}", "=", "]"):
            if self.is_(end, "<"):
                while not self.is_(end, ">", ";"):
                    end += 1
            elif re.match(r"[A-Za-z_]", self.tokens[end].text):
                if called and self.is_(end - 1, called) and end - 1 >= i:  # two words: a declaration
                    return
                called = self.tokens[end].text
            end += 1
        if not self.is_(end, "(") or not self.is_(self.closing[end] + 1, ";") or called in _KEYWORDS:
            return
        if called not in self.ordering and not _INTRINSIC.fullmatch(called):
            return
        number = self._add(i, self.closing[end] + 1, ORDERS, "left out")
        self.insertions.append(Insertion(self.tokens[i].start, 0, f"if (left_out({{{number}}})); else "))

    def _valued(self, i: int) -> None:
        """A barrier that counts votes, in an expression: without it, each thread has its own vote, the last argument."""
        if not self.is_(i + 1, "(") or not re.fullmatch(r"__syncthreads_\w+|named_barrier_any", self.tokens[i].text):
            return
        if self.is_(i - 1, ";", "{", "}") or not self.is_(self.enclosing[i], "{", "("):
            return
        last = self.closing[i + 1]
        vote = self._parts(i + 2, last - 1, ",")[-1]
        number = self._add(i, last, ORDERS, "left out")
        own = self.text[self.tokens[vote[0]].start : self.tokens[vote[1]].end]
        self._around(i, last, f"(left_out({{{number}}}) ? bool({own}) : ")

    def _is_head(self, closing: int) -> bool:
        """Whether a parenthesis ends the head of an `if`, `for` or `while`."""
        before = self.opening[closing] - 1
        return self.is_(before, "if", "for", "while") or (self.is_(before, "constexpr") and self.is_(before - 1, "if"))

    def _condition(self, i: int) -> None:
        """The condition of an `if`; the end of a `for` or `while`."""
        if not self.is_(i, "if", "for", "while") or not self.is_(i + 1, "("):
            return
        first, last = i + 2, self.closing[i + 1] - 1
        if self.is_(i, "if"):
            self._guard(first, last)
            return
        if self.is_(i, "for"):
            ends = [n for n in self._top(first, last) if self.is_(n, ";")]
            if len(ends) != 2 or ends[1] == ends[0] + 1:
                return
            first, last = ends[0] + 1, ends[1] - 1
        for begin, end in self._parts(first, last, "&&"):
            self._loop_end(begin, end)

    def _loop_end(self, first: int, last: int) -> None:
        (*compared,) = [n for n in self._top(first, last) if self.is_(n, "<", "<=", ">", ">=")]
        if len(compared) != 1 or self._is_known(compared[0] + 1, last):
            return
        more = "+" if self.is_(compared[0], "<", "<=") else "-"
        number = self._add(first, last, LOOP, "one later")
        self.insertions.append(Insertion(self.tokens[last].end, -2, f" {more} further({{{number}}})"))

    def _is_known(self, first: int, last: int) -> bool:
        """Whether an expression consists of numbers and constants: it is the size of something, not a bound."""
        words = (t.text for t in self.tokens[first : last + 1] if t.text[0].isalpha())
        return all(re.fullmatch(r"[A-Z][A-Z0-9_]+|[A-Z]\w*Tile|N|true|false", word) for word in words)

    def _top(self, first: int, last: int) -> Iterator[int]:
        """The tokens between these that are in no bracket of their own."""
        n = first
        while n <= last:
            yield n
            n = self.closing.get(n, n) + 1

    def _parts(self, first: int, last: int, operator: str) -> list[tuple[int, int]]:
        cuts = [first - 1, *(n for n in self._top(first, last) if self.is_(n, operator)), last + 1]
        return [(a + 1, b - 1) for a, b in pairwise(cuts)]

    def _ternary(self, i: int) -> None:
        if self.is_(i, "?"):
            first = self._begin(i, ("=", "(", ",", "return", "{", ";", "?", ":", "[", *ASSIGNS))
            self._guard(first, i - 1)

    def _guard(self, first: int, last: int) -> None:
        """A condition; of a conjunction or disjunction the operands are guards, and of constants nothing is."""
        if self._is_known(first, last) or any(self.is_(n, "&&", "||") for n in self._top(first, last)):
            return
        number = self._add(first, last, GUARD, "always true", "never true")
        self._around(first, last, f"chosen<{{{number}}}>")

    def _operand(self, i: int) -> None:
        """The two operands of a conjunction or a disjunction."""
        if not self.is_(i, "&&", "||") or self.is_(i + 1, ")", ",", "="):
            return
        ends = ("=", "(", ",", "return", "{", ";", "?", ":", "[", "||", *ASSIGNS)
        neutral = "always true" if self.is_(i, "&&") else "never true"
        stops = ends if self.is_(i, "||") else (*ends, "&&")
        if not self._is_type(i):
            first = self._begin(i, stops)
            if not self.is_(first - 1, self.tokens[i].text):  # the operand before has been found as a second one
                self._conjunct(first, i - 1, neutral)
            self._conjunct(i + 1, self._end(i, (")", ",", ";", "?", ":", "}", "]", "&&", "||")), neutral)

    def _conjunct(self, first: int, last: int, neutral: str) -> None:
        if any(self.is_(n, "&&") for n in self._top(first, last)):
            return  # an operand of a disjunction: its own operands are found
        if self._is_known(first, last):
            return
        number = self._add(first, last, GUARD, neutral)
        self._around(first, last, f"{'kept' if neutral == 'never true' else 'passed'}<{{{number}}}>")

    def _is_type(self, i: int) -> bool:
        """Whether && is that of a reference."""
        return self.is_(i - 1, "auto", "T", "Args") or self.is_(i + 1, "...")

    def _stored_condition(self, i: int) -> None:
        """A condition that is kept in a variable."""
        if self.is_(i, "bool") and self.is_(i + 2, "=") and re.match(r"[a-z_]", self.tokens[i + 1].text):
            last = self._end(i + 2, (";",))
            others = [n for n in self._top(i + 3, last) if self.is_(n, ",") and self.is_(n + 2, "=")]
            self._guard(i + 3, others[0] - 1 if others else last)

    def _begin(self, i: int, stops: tuple[str, ...]) -> int:
        """The first token of the operand before token `i`."""
        n = i - 1
        while n >= 0 and not self.is_(n, *stops):
            n = self.opening.get(n, n) - 1
        return n + 1

    def _end(self, i: int, stops: tuple[str, ...]) -> int:
        """The last token of the operand behind token `i`."""
        n = i + 1
        while not self.is_(n, *stops):
            n = self.closing.get(n, n) + 1
        return n - 1

    def _bound(self, i: int) -> None:
        if self.is_(i, "min", "max") and self.is_(i + 1, "(") and not self.is_(i - 1, ".", "->"):
            last = self.closing[i + 1]
            if len(self._parts(i + 2, last - 1, ",")) != 2:
                return
            number = self._add(i, last, BOUND, "the first operand", "the second operand")
            token = self.tokens[i]
            self.insertions.append(Insertion(token.start, 10**6, f"{token.text}_but<{{{number}}}>", len(token.text)))

    # --- the text in which each can be taken away

    def removable(self) -> str:
        text, position = "", 0
        numbers = [self._numbers[n] for n in range(len(self.removals))]
        for one in sorted(self.insertions, key=lambda one: (one.at, one.rank)):
            words = re.sub(r"\{(\d+)\}", lambda m: str(numbers[int(m[1])]), one.text)
            text += self.text[position : one.at] + words
            position = one.at + one.skips
        return text + self.text[position:]


def ordering_statements(text: str) -> list[re.Match[str]]:
    """Every statement of a file that orders something: its call, to the semicolon."""
    whole = re.compile(".*", re.DOTALL)
    spans = ((removal.start, removal.end) for removal in Emitted(text).removals if removal.kind == ORDERS)
    found = (whole.fullmatch(text, *span) for span in spans)
    return [match for match in found if match is not None and match[0].endswith(";")]

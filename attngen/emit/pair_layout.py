"""Where the pairs of a tile lie: in which register of a thread, and of which row and key.

Templates say once what is computed for a pair (`parts/pair.j2`), over a layout. A new family of products adds its layout here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Place:
    """The row or the key of a pair: its index is that of the thread's first pair, and a step that the compiler knows."""

    index: str
    first: str
    step: str
    end: str  # rows or keys from here on do not exist; "": all exist

    @property
    def existing(self) -> str:
        """The index, limited to rows or keys that exist."""
        return f"min({self.index}, {self.end} - 1)" if self.end else self.index


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Where a pair is that templates call (r, j), or i."""

    q: Place
    kv: Place
    loops: tuple[str, ...]  # over all pairs of a thread
    score: str  # the register that has s, later the score
    dp: str = ""
    number: str = ""  # where a number of the pair's row is: a format, as all below
    row: str = ""  # its place in the tile, if that is a variable `row`
    key_vector: str = ""
    row_element: str = ""
    word: str = ""  # elements of two pairs, neighbouring keys of a row; "": each pair reads its own
    odd: str = ""  # whether the pair is the second of the two
    head: str = ""  # the row's head, if a tile has several
    limited: tuple[tuple[str, str], ...] = ()  # arguments that are limited when a function is called
    is_transposed: bool = False  # the product is: a row of fragments is a key

    def indices(self, limits_q: bool, limits_kv: bool) -> dict[str, str]:
        """The indices of a pair, by the names that functions have for them. `limits_q`, `limits_kv`: of one that exists."""
        heads = {"h_idx": self.head} if self.head else {}
        of_q, of_kv = (p.existing if limits else p.index for p, limits in ((self.q, limits_q), (self.kv, limits_kv)))
        own = {"q_idx": self.q.index, "kv_idx": self.kv.index}
        return {"q_idx": of_q, **heads, "kv_idx": of_kv} | {name: own[name] for name, _ in self.limited}

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments of a function that are not variables with their names: an index as a first one and a step."""
        q, kv = self.q, self.kv
        return {"q_first": q.first, "q_step": q.step, "kv_first": kv.first, "kv_step": kv.step, **dict(self.limited)}

    def with_own_indices(self, limits_q: bool, limits_kv: bool) -> PairLayout:
        """The layout, where q_idx and kv_idx may be past the end, so that they are limited when a function is called."""
        of_q, of_kv = ("q_idx", f"min(q_idx, {self.q.end} - 1)"), ("kv_idx", f"min(kv_idx, {self.kv.end} - 1)")
        return replace(self, limited=(of_q,) * (limits_q and bool(self.q.end)) + (of_kv,) * limits_kv)

    @property
    def past_keys(self) -> str:
        """Whether the pair's key is past the end."""
        return f"{self.kv.index} >= {self.kv.end}"

    @property
    def past_rows(self) -> str:
        return f"{self.q.index} >= {self.q.end}"

    @property
    def with_rows_outside(self) -> PairLayout:
        """The layout, with the loop over rows outside, so that a row's numbers are read once."""
        return replace(self, loops=self.loops[::-1]) if self.is_transposed else self

    @property
    def reading_by_itself(self) -> PairLayout:
        """The layout, whose pairs read each its own elements."""
        return replace(self, word="")

    def numbers_at(self, number: str, row: str = "") -> PairLayout:
        """The layout, with other places of the numbers of rows."""
        return replace(self, number=number, row=row)

    def of_row(self, name: str) -> str:
        return self.number.format(name)


def _spread(origin: str, lane: str, index: str, end: str) -> Place:
    """Rows or keys of a thread whose place in the tile is lane(index)."""
    first = f"{lane}(0)"
    return Place(f"{origin} + {lane}({index})", f"{origin} + {first}", f"{lane}({index}) - {first}", end)


def _of_warpgroup(first: str, step: str, end: str) -> Place:
    return Place(f"{first} + {step}", first, step, end)


BY_ROWS, BY_COLUMNS = "int r = 0; r < ROWS; ++r", "int j = 0; j < COLUMNS; ++j"
COLUMNS_IN_PAIR, ROWS_IN_PAIR = "column_of(i)", "8 * row_in_pair(i)"

# Fragments [r][j]: of a grid of threads, or of mma.sync
FRAGMENTS = PairLayout(
    q=_spread("q_lo", "row_of", "r", "q_len"),
    kv=_spread("kv_lo", "column_of", "j", "kv_len"),
    loops=(BY_ROWS, BY_COLUMNS),
    score="S_frag[r][j]",
    dp="dP_frag[r][j]",
    number="{}_of[r]",
    key_vector="keys->{}[column_of(j)]",
    row_element="{}_each[r]",
    word="{}s[r][j / 2]",
    odd="j % 2",
)

# The same of a product that is computed transposed: a row of fragments for a key
TRANSPOSED = replace(
    FRAGMENTS,
    q=_spread("q_lo", "column_of", "j", "q_len"),
    kv=_spread("kv_lo", "row_of", "r", "kv_len"),
    word="",
    is_transposed=True,
)

# Rows of several heads in one tile, each with its own index
PACKED_HEADS = replace(FRAGMENTS, q=Place("q_idx_of[r]", "q_idx_of[r]", "0", ""), head="h_idx_of[r]")

# Registers i of a thread of a warpgroup, with the two rows lane_row and lane_row + 8
WARPGROUP = PairLayout(
    q=_of_warpgroup("q_lo + lane_row", ROWS_IN_PAIR, "q_len"),
    kv=_of_warpgroup("kv_lo + lane % 4 * 2", COLUMNS_IN_PAIR, "kv_len"),
    loops=("int i = 0; i < BLOCK_KV / 2; ++i",),
    score="frag.S[i]",
    dp="frag.dP[i]",
    key_vector="keys.{}[lane % 4 * 2 + column_of(i)]",
    row_element="row_elements[row_in_pair(i)].{}",
    word="words[i / 2 % 4]",
    odd="i % 2",
)

# The same in a backward; `key` of the tile is a variable
ROWS_OF_WARPGROUP = replace(
    WARPGROUP,
    kv=Place("kv_lo + key", "kv_lo + lane % 4 * 2", COLUMNS_IN_PAIR, "kv_len"),
    number="frag.{}[row_in_pair(i)]",
    word="frag.P[i / 8][i / 2 % 4]",
)

# The same transposed, with the two keys lane_key and lane_key + 8; `row` of the tile is a variable
KEYS_OF_WARPGROUP = replace(
    WARPGROUP,
    q=Place("q_lo + row", "q_lo + lane % 4 * 2", COLUMNS_IN_PAIR, "q_len"),
    kv=_of_warpgroup("kv_lo + lane_key", ROWS_IN_PAIR, "kv_len"),
    loops=("int i = 0; i < BLOCK_Q / 2; ++i",),
    number="of_row.{}[row]",
    word="frag.P[i / 8][i / 2 % 4]",
)

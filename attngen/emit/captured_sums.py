"""What templates see of the gradients of captured tensors: the sums of their terms, and the kernels that add these up."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit import abi, comment_text
from attngen.emit.constants import ConstantLine
from attngen.emit.file import File
from attngen.emit.gradient_functions import CapturedFunctions, ContributionFunctions
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Axis, Extent, Parameter, Tensor, grid_of_elements
from attngen.emit.variant import LOCALS, Function
from attngen.plan.captured_sums import SIZE_OF_INDEX, WORDS, Place, TermSum
from attngen.plan.saved import delta_of, row_values, row_workspaces
from attngen.spec.dtypes import DTYPES
from attngen.spec.gradient import INDEX_NAMES, CapturedGradient, Source, gradient_argument

PER_THREAD = 16  # elements per thread, if there is one per pair: with fewer, starting blocks takes longer than their work
TERM_CONSTANTS = (
    ConstantLine("WORDS", WORDS, "of a sum without rounding"),
    ConstantLine("PER_THREAD", PER_THREAD, "that a thread sets to 0, or adds up, one after the other"),
)
INDEX_OF = {"rows": "bhq", "keys": "bhk", "pairs": "bhqk", "words": ""}  # indices of a workspace's numbers, by place


Read = ContributionFunctions[Function]


def call(name: str, function: Function) -> str:
    return f"{name}({', '.join(function.given({}))})"


def times(read: Read) -> str:
    """What a factor of the read multiplies by."""
    return f" * {call(read.name, read.factor)}" if read.factor else ""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradient of one captured tensor or param, and the functions of its elements."""

    tensor: Tensor
    functions: CapturedFunctions[Function]

    @property
    def rank(self) -> int:
        return len(self.tensor.axes)

    @property
    def sizes(self) -> list[str]:
        return [f"{self.tensor.name}_size_{dim}" for dim in range(self.rank)]

    @property
    def strides(self) -> list[str]:
        return [f"{self.tensor.name}_stride_{dim}" for dim in range(self.rank)]

    @property
    def offset(self) -> str:
        """Where the element i0, i1, ... is, in elements."""
        return " + ".join(f"i{dim} * {stride}" for dim, stride in enumerate(self.strides)) or "0"

    @property
    def rounded(self) -> str:
        """A number as an element is stored."""
        return "%s" if self.tensor.dtype == "fp32" else f"to_{self.tensor.dtype}(%s)"

    @property
    def has_single_pairs(self) -> str:
        """Whether each element has a single pair: the tensor is not broadcast."""
        sizes = {index: self.sizes[dim] for index, dim in self.functions.own.items()}
        lengths = zip(INDEX_NAMES, SIZE_OF_INDEX.values(), strict=True)
        return " && ".join(f"{sizes.get(index, 1)} == {length}" for index, length in lengths)

    def matches(self, read: Read) -> list[str]:
        """The conditions under which an element is the one that a pair reads."""
        equal = {i.dim: f"{call(i.name, i.function)} == i{i.dim}" for i in read.indices}
        free = [axis.is_free for axis in self.tensor.axes]
        return [f"({self.sizes[dim]} == 1 || {same})" if free[dim] else same for dim, same in equal.items()]


@dataclass(frozen=True, slots=True)
class Terms(Gradients):
    """A workspace, and the terms that are added to it."""

    name: str
    place: Place
    reads: tuple[Read, ...]
    ds: str  # the gradient of s in the kernel
    sums_diagonals: bool  # a term is the sum of a tile's diagonal
    may_be_all: bool  # pairs only: an element may have a single pair, whose term is then the gradient itself
    are_neighbours: bool  # and that is dS in 16 bits, neighbouring keys have neighbouring elements, and a thread has both pairs

    def of(self, *sources: Source) -> tuple[Read, ...]:
        return tuple(c for c in self.reads if c.source in sources)

    @property
    def of_pairs(self) -> tuple[Read, ...]:
        return self.of("score", "scale")

    @property
    def of_sinks(self) -> tuple[Read, ...]:
        return self.of("sink")

    @property
    def diagonals(self) -> list[tuple[str, Read]]:
        """The terms of which a tile's diagonals are added up, with the names of their fragments."""
        return [(f"{self.name}_terms{n}", c) for n, c in enumerate(self.of_pairs, 1)] if self.sums_diagonals else []

    @property
    def in_words(self) -> list[tuple[str, str, Read]]:
        """The terms that each pair adds to words: the names of their place and value, and the reads."""
        each = self.place == "words" and not self.sums_diagonals
        return [(f"{self.name}_at{n}", f"{self.name}_term{n}", c) for n, c in enumerate(self.of_pairs, 1)] if each else []

    @property
    def in_fragments(self) -> tuple[Read, ...]:
        """The terms that a thread adds up by itself."""
        return self.of_pairs if self.place in ("rows", "keys") else ()

    def term(self, *reads: Read) -> str:
        """What a pair adds, or a row through its sink."""
        of_source = {"score": "dS", "scale": f"{self.ds} * S_frag[r][j]", "sink": "weighted_delta"}
        return " + ".join(of_source[c.source] + times(c) for c in reads)

    @property
    def term_of_pair(self) -> str:
        """All that a pair adds, 0 where dS is 0: a factor may be infinite."""
        term = self.term(*self.reads)
        return f"dS == 0.0f ? 0.0f : {term}" if "dS" in term and term != "dS" else term

    @property
    def own_indices(self) -> dict[int, str]:
        """The index of each dimension that has one of the pair's own."""
        return {dim: LOCALS[index] for index, dim in self.functions.own.items()}

    @property
    def numbered_indices(self) -> list[str]:
        """The initializers of i0, i1, ... for the element of a pair."""
        return [f"i{dim} = {index}" for dim, index in self.own_indices.items()]

    def words(self, read: Read) -> str:
        """The words of the element that a pair reads."""
        at = self.own_indices | {i.dim: call(i.name, i.function) for i in read.indices}
        indices = [
            f"({size} == 1 ? 0 : {at[dim]})" if axis.is_free else at[dim]
            for dim, (size, axis) in enumerate(zip(self.sizes, self.tensor.axes, strict=True))
        ]
        element = f"((long long){indices[0]})" if indices else ""
        for size, index in zip(self.sizes[1:], indices[1:], strict=True):
            element = f"({element} * {size} + {index})"
        return f"{self.name} + {element} * WORDS"

    @property
    def indices(self) -> str:
        return INDEX_OF[self.place]


@dataclass(frozen=True, slots=True)
class CapturedKernel(Gradients):
    """The kernel of one captured gradient."""

    kernel: KernelText


@dataclass(frozen=True, slots=True)
class LastKernel(CapturedKernel):
    """The kernel that adds up the terms of one captured gradient."""

    sums: tuple[Terms, ...]
    indices: str  # indices of the workspaces' numbers, such as "bhq"
    by_block: bool  # a block adds up one element, else a thread, or several
    inner: str | None  # the index that counts a thread's elements, q or k, if it has several: pairs' own

    @property
    def in_words(self) -> bool:
        return any(s.place == "words" for s in self.sums)


@dataclass(frozen=True, slots=True)
class ZeroKernel:
    """The kernel that sets a workspace to 0: pairs that no block visits add nothing, and words are counted up from 0."""

    kernel: KernelText
    terms: Terms
    sizes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RowKernel:
    """A kernel whose blocks own rows and visit keys, as the template sees it."""

    kernel: KernelText
    title: str
    sums_q: bool
    sums_delta: bool
    row_values: tuple[str, ...]  # the kernel reads these
    terms: tuple[Terms, ...]  # terms of captured gradients, which the kernel adds up
    visits_keys: bool  # gradients of sinks alone need none
    equations: tuple[str, ...]


def _inner_index(functions: CapturedFunctions[Function], sums: tuple[Terms, ...], rank: int) -> str | None:
    """Of sums of pairs, the index that is always that of the tensor's last dimension."""
    if [s.place for s in sums] != ["pairs"] or sums[0].reads[0].indices:
        return None
    return next((i for i, dim in functions.own.items() if i in "qk" and dim == rank - 1), None)


class CapturedSums(File):
    """The context of a backward that keeps no scores in memory: its gradients, those of captured tensors too."""

    def gradient_kernels(self) -> dict[str, KernelText]:
        """The kernels that the wanted gradients need, by their names, in launch order; beside those of captured gradients."""
        raise NotImplementedError

    def terms_of(self, name: str) -> tuple[Terms, ...]:
        """What a kernel adds up of captured gradients."""
        raise NotImplementedError

    def workspace(self, name: str) -> tuple[Axis, ...]:
        """Those of `row_workspaces`: lse, or lse_rest, is that of weights as this backward computes them, which add up to 1."""
        return abi.every_row(self.spec)

    @property
    def form_of_weights(self) -> str:
        """How the weights of a softmax are recomputed: one of the forms of `parts/pair.j2`."""
        raise NotImplementedError

    def kernels(self) -> dict[str, KernelText]:
        return {
            **{f"zero_{name}": zero.kernel for name, zero in self.zero_kernels().items()},
            **self.gradient_kernels(),
            **{name: last.kernel for name, last in self.last_kernels().items()},
        }

    def context(self) -> dict[str, object]:
        kernels = self.kernels()
        return super().context() | {
            "zero_kernels": self.zero_kernels().values(),
            "last_kernels": self.last_kernels().values(),
            "row_kernels": [self._row_kernel(name, kernel) for name, kernel in kernels.items() if name in self.row_owners],
            "row_values": self.row_values,
            "lse_parts": [name for name in self.row_values if name in ("lse", "lse_rest")],
            "captured_equations": self.captured_equations,
            "ds": self.ds,
            "kept_factor": self.kept_factor,
            "kept_weights": "(D P)" if self.variant.dropout else "P",
            "weight_form": self.form_of_weights if self.spec.normalize == "softmax" else self.spec.normalize,
            "row_workspaces": self.row_workspaces,
        }

    @property
    def kept_factor(self) -> str:
        """What dV is multiplied with, because some weights are dropped."""
        return "kept_factor(dropped_weights(in))" if self.variant.dropout else "1.0f"

    @property
    def ds(self) -> str:
        """The name of the gradient of scaled dot products."""
        return "ds" if self.variant.derivative else "dS"

    def pair_equations(self, of_scores: bool) -> list[str]:
        return comment_text.pair_equations(self.spec, self.gradient, of_scores)

    @property
    def sums_delta(self) -> bool:
        """Whether a kernel that owns rows adds up delta over their keys."""
        return delta_of(self.facts) == "sums over keys"

    @property
    def row_owners(self) -> tuple[str, ...]:
        """The names that kernels which own rows and visit keys have."""
        return ("delta", "dq") if self.sums_delta else ("dq",)

    @property
    def row_values(self) -> tuple[str, ...]:
        return row_values(self.facts)

    def _row_kernel(self, name: str, kernel: KernelText) -> RowKernel:
        """One of `row_owners`."""
        values, sums_delta, sums_q = self.row_values, name == "delta", name == "dq" and self.plan.wants("q")
        if sums_delta:
            own = {name: workspace for name, workspace in self.row_workspaces.items() if name != "delta"}
            values = tuple(n for n in values if n != "delta")
            equations = comment_text.delta_equations(self.spec, self.gradient, own)
        else:
            of_q = [f"dQ = softmax_scale * {self.ds} K"] if sums_q else []
            equations = (*self.pair_equations(True), *of_q)
        terms = self.terms_of(name)
        visits_keys = sums_q or sums_delta or any(t.of("score", "scale") for t in terms)
        title = "Delta" if sums_delta else "dQ" if sums_q else "Sums of rows"
        return RowKernel(kernel, title, sums_q, sums_delta, values, terms, visits_keys, equations)

    @property
    def row_workspaces(self) -> dict[str, str]:
        return row_workspaces(self.facts)

    def row_inputs(self, kernel: str) -> list[str]:
        """Those of `row_values` that a kernel reads from the forward's results; that of delta reads no workspace."""
        written = {"delta"} if kernel == "delta" else self.row_workspaces.keys()
        return [n for n in self.row_values if n not in written]

    def term_sums(self, *places: Place) -> tuple[Terms, ...]:
        """The sums in `places`, by default all."""
        return tuple(self._terms(s) for s in self.plan.term_sums if not places or s.place in places)

    def _terms(self, of: TermSum) -> Terms:
        functions = self._functions(of.captured)
        tensor = self.tensors[gradient_argument(of.captured)]
        reads = tuple(functions.contributions[n] for n in of.reads)
        may_be_all = bool(self.tensors[of.name].unless)
        is_ds = len(reads) == 1 and reads[0].factor is None and self.variant.derivative is None
        is_last = (
            functions.own.get("k") == len(tensor.axes) - 1
            and self.spec.dtype.bytes == 2
            and tensor.dtype == self.spec.dtype.name
        )
        are_neighbours = may_be_all and is_ds and is_last and self.plan.schedule.on_tensor_cores
        return Terms(tensor, functions, of.name, of.place, reads, self.ds, of.diagonals, may_be_all, are_neighbours)

    def _functions(self, captured: str) -> CapturedFunctions[Function]:
        return next(one for one in self.variant.captured_gradients if one.gradient.name == captured)

    def term_parameters(self, *places: Place) -> list[Parameter]:
        """The workspaces in `places`, for the kernel that adds terms to them."""
        parameters: list[Parameter] = []
        for terms in self.term_sums(*places):
            parameters.append(abi.data(terms.name, "long long" if terms.place == "words" else "float", writable=True))
            if terms.may_be_all:
                parameters.append(abi.data(terms.tensor.name, DTYPES[terms.tensor.dtype].cuda, writable=True))
                parameters += [*abi.all_strides(terms.tensor), *abi.sizes(self.spec, "batch")]
            if terms.place == "words" or terms.may_be_all:
                parameters += abi.extents(terms.tensor)
        return list({p.name: p for p in parameters}.values())

    def term_functions(self, *places: Place) -> tuple[Function, ...]:
        """The device functions of the terms in `places`."""
        return tuple(f for terms in self.term_sums(*places) for f in terms.functions.functions)

    def captured_equations(self, captured: CapturedGradient) -> list[str]:
        return comment_text.captured_equations(self.spec, self.gradient, captured)

    def zero_kernels(self) -> dict[str, ZeroKernel]:
        """By the names of their workspaces, in launch order. Without a mask, every pair's term is written."""
        places: tuple[Place, ...] = ("pairs", "words") if self.spec.mask else ("words",)
        return {t.name: self._zero_kernel(t) for t in self.term_sums(*places)}

    def _zero_kernel(self, terms: Terms) -> ZeroKernel:
        workspace = self.tensors[terms.name]
        ctype = "long long" if terms.place == "words" else "float"
        if terms.place == "words":
            sizes: tuple[Extent, ...] = workspace.shape[:-1]
            of_sizes = abi.extents(terms.tensor)
        else:
            of_sizes = abi.whole_sizes(self.spec, "batch", "q_heads", "q_len", "kv_len")
            sizes = workspace.shape
        parameters = [abi.data(terms.name, ctype, writable=True), *of_sizes]
        names = tuple(p.name for p in of_sizes) if terms.place == "words" else tuple(self.lengths[i] for i in terms.indices)
        return ZeroKernel(
            self.kernel(f"zero_{terms.name}", grid_of_elements(sizes, self.plan.threads * PER_THREAD), parameters), terms, names
        )

    def last_kernels(self) -> dict[str, LastKernel]:
        """By the names of the gradients, in launch order."""
        return {gradient_argument(one.gradient.name): self._last_kernel(one) for one in self.variant.captured_gradients}

    def _last_kernel(self, functions: CapturedFunctions[Function]) -> LastKernel:
        tensor = self.tensors[gradient_argument(functions.gradient.name)]
        sums = tuple(t for t in self.term_sums() if t.tensor == tensor)
        indices = sums[0].indices if sums else ""
        by_block = "q" in indices and "q" not in functions.own
        of_indices = [i.function for s in sums for c in s.reads for i in c.indices if s.place != "words"]
        parameters = [
            *(abi.data(s.name, "long long" if s.place == "words" else "float") for s in sums),
            abi.data(tensor.name, DTYPES[tensor.dtype].cuda, writable=True),
            *abi.extents(tensor),
            *abi.all_strides(tensor),
            *(abi.sizes(self.spec, "batch", "q_heads", "kv_heads", "q_len", "kv_len") if indices else []),
            *self.captured(*of_indices, scale=False),
        ]
        inner = _inner_index(functions, sums, len(tensor.axes))
        of_block = self.plan.threads * (PER_THREAD if inner else 1)
        grid = tensor.shape[::-1] if by_block else grid_of_elements(tensor.shape, of_block)
        return LastKernel(
            tensor,
            functions,
            self.kernel(tensor.name, grid, parameters, threads_name="THREADS, 1"),  # else registers are spilled for more blocks
            sums,
            indices,
            by_block,
            inner,
        )

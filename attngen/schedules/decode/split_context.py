"""The emission context of kernels that split keys over blocks, and join the results."""

from __future__ import annotations

from attngen.emit import abi
from attngen.emit.kernel_text import KernelText
from attngen.emit.program import Axis, PackedTiles, Parameter, Several
from attngen.plan.split_keys import Splits
from attngen.schedules.parts.fused_context import Fused
from attngen.schedules.parts.tma_context import box_rows

# indices of a thread's rows: each if a function has one of these arguments
ROW_INDICES = {"q_idx": {"q_idx", "q_first"}, "h_idx": {"h_idx"}}
JOINING = 128  # threads of a block that joins splits: each has four columns of O, of some of the splits
JOINING_WIDE = 512  # the same of heads that leave too few groups
VALUES_BEGIN = "the column of K that is the first of V"


class SplitKeys(Fused):
    """A kernel that computes the results of a split, and one that joins those of all splits."""

    @property
    def number_of_splits(self) -> Splits:
        assert self.own.splits is not None
        return self.own.splits

    @property
    def starts_early(self) -> bool:
        """Whether a kernel starts while another runs."""
        raise NotImplementedError

    @property
    def key_tensors(self) -> str:
        """Those that hold keys and values."""
        raise NotImplementedError

    @property
    def joining(self) -> int:
        """The threads of a block that joins splits."""
        raise NotImplementedError

    def workspace(self, name: str) -> tuple[Axis, ...]:
        """Of each split, split_O has sums of P V, for weights that the split's maximum is subtracted from; split_max this
        maximum (-inf: the split has no key for the row, and wrote nothing else), split_sum the sum of these weights."""
        columns = [Axis("", self.spec.head_dim_v)] if name == "split_O" else []
        return abi.every_row(self.spec, Axis("", self.number_of_splits), *columns)

    def maps(self) -> list[Parameter]:
        """The tensor maps of K and V, if TMA copies them."""
        return [self.tensor_map(t, box_rows(self.plan, self.spec)) for t in (self.key_tensors if self.by_tma else "")]

    def kernels(self) -> dict[str, KernelText]:
        return {"split": self.split_kernel(), "join": self.join_kernel()}

    def split_kernel(self) -> KernelText:
        """The results, of one split: a block for each tile of rows, split, head of keys and batch."""
        v = self.variant
        parameters = [
            *self.maps(),
            *self.arrays("Q" if self.by_tma else "Q" + self.key_tensors, "O", *self.partial_results(writable=True), axes="bhs"),
            *(
                p
                for t in (self.key_tensors if self.by_tma and self.spec.kernel.is_counted else "")
                for p in self.strides(t, "bs")
            ),
            *self.lse_parameters(),
            *self.sizes(),
            *self.pages(),
            self.splits(),
            *self.captured(*v.of_scores, *v.of_row_terms, v.mask, v.sink, v.v_scale, v.kv_range, v.classify),
        ]
        grid = self.kv_head_grid(PackedTiles(self.plan.block_q), self.number_of_splits)
        bounds = self.launch_bounds()
        return self.kernel("split", grid, parameters, threads_name=bounds, shared=True, early=self.starts_early)

    def join_kernel(self) -> KernelText:
        """The results of several splits: a block for each row."""
        parameters = [
            *self.partial_results(writable=False),
            *self.arrays("", "O", axes="bhs"),
            *self.lse_parameters(),
            *abi.sizes(self.spec, *(["batch"] if self.variant.uses_batch else []), "q_heads", "kv_heads", "q_len"),
            *(abi.sizes(self.spec, "kv_len") if self.variant.sink else []),
            self.splits(),
            *self.captured(self.variant.sink, self.variant.v_scale, scale=self.variant.exponent_varies),
        ]
        grid = (Several(self.number_of_splits), *self.head_grid("q_len"))
        return self.kernel("join", grid, parameters, threads=self.joining, threads_name="JOINING", early=self.starts_early)

    def partial_results(self, writable: bool) -> list[Parameter]:
        return [abi.data(name, "float", writable=writable) for name in self.plan.workspaces]

    def splits(self) -> Parameter:
        return Parameter("splits", "int", "splits", "", formula=self.number_of_splits)

    def context(self) -> dict[str, object]:
        v = self.variant
        of_heads = [f for f in (v.kv_range, v.classify) if f is not None and "h_idx" in f.arguments]
        of_pairs = {a for f in (*v.of_scores, *v.of_row_terms, v.mask, v.scale_of_keys) if f is not None for a in f.arguments}
        return super().context() | {
            "key_tensors": self.key_tensors,
            "head_ranges": bool(of_heads),
            "reads_ahead": self.by_tma and self.spec.kernel.is_paged and v.classify is None,
            "row_indices": [i for i, read in ROW_INDICES.items() if read & of_pairs],
        }

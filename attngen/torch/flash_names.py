"""Arguments that only some versions of flash-attention have: hints, other names, and what attngen does not support."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.torch.block_mask import takes

FP8 = "queries of 8 bits beside a cache are not supported; convert them to 16 bits, and multiply them by their scale"
SPARSE = "attngen skips the blocks that a mask leaves empty; pass the mask itself, as `mask_mod`"
# Why an argument is refused, and what to use. None and False are what functions without the argument do.
REFUSED = {
    "q_descale": FP8,
    "qv": "a second product of queries and values is not supported; concatenate `q` with `qv`, and `k` with `v`",
    "gather_kv_indices": "keys that are selected for each row are not supported; mask the others by `mask_mod`",
    "score_mod_bwd": "attngen derives the gradients of `score_mod`; leave it out",
    "aux_tensors": "a `score_mod` or `mask_mod` refers to tensors by their names, as for flex_attention; leave it out",
    "aux_scalars": "a `score_mod` or `mask_mod` refers to numbers by their names, as for flex_attention; leave it out",
    "block_sparse_tensors": SPARSE,
    "block_sparse_tensors_bwd": SPARSE,
    "seqlen_k_per_split": "attngen plans its own splits; Attention(attngen.define(..., batch_invariant=True)) fixes them",
    "rotary_seqlens": "rows are rotated at their positions in the cache; rotate them before the call",
    "cu_seqlens_q": "call flash_attn_varlen_func with `block_table` and `seqused_k` for packed rows",
    "cu_seqlens_k_new": "append packed rows by torch.ops.attngen.append, and call flash_attn_varlen_func",
}
MODS = ("score_mod", "mask_mod")
HINTS = ("scheduler_metadata", "disable_scheduler_metadata", "min_seqlen_k", "max_seqlen_q")  # about how to compute, not what


def check_others(function: str, others: Mapping[str, object], names: tuple[str, ...]) -> None:
    """Raises ArgumentError for arguments of flash-attention that attngen does not support, and TypeError for others. `names`
    are those of REFUSED, and of MODS, that this function has."""
    for name, value in others.items():
        if name in names:
            if name not in MODS and value is not None and value is not False:  # the function says why it refuses those
                raise ArgumentError(f"`{name}` is not supported: {REFUSED[name]}")
        elif name not in HINTS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def check_hints(num_splits: object, pack_gqa: object, sm_margin: object) -> None:
    """Raises ArgumentTypeError for hints of another type. attngen plans splits, the rows of a group of heads, and grids itself,
    so that they have no effect."""
    for name, value in (("num_splits", num_splits), ("sm_margin", sm_margin)):
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise ArgumentTypeError(f"`{name}` is a {type(value).__name__}; expected an int or None")
    if pack_gqa is not None and not isinstance(pack_gqa, bool):
        raise ArgumentTypeError(f"`pack_gqa` is a {type(pack_gqa).__name__}; expected a bool or None")


def one_of(**named: object) -> Any:
    """The value of an argument with two names, of which at most one is given. Raises ArgumentError."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ArgumentError(f"{' and '.join(f'`{name}`' for name in given)} are two names of one argument; pass one of them")
    return next(iter(given.values()), None)


def check_mod(name: str, function: Callable[..., object], arguments: str) -> None:
    """Raises ArgumentError for a modification that is no function of `arguments`, as flex_attention's are. torch.compile traces
    it, and says so itself."""
    if not torch.compiler.is_dynamo_compiling() and not takes(function, arguments.count(",") + 1):
        raise ArgumentError(
            f"`{name}` is no function of ({arguments}): attngen reads functions of tensors, as flex_attention does, not those "
            "of CuTe that FlashAttention-4 compiles"
        )

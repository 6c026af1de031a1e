"""attngen for models of Hugging Face's transformers, by one import.

    import attngen.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attngen")

The import registers "attngen" with both interfaces of transformers (5.0 or later): attention and masks. A mask stays a function
of positions (causal, sliding, chunked, packed, padded, blocks of an image), so no mask of all pairs is built. Soft-caps,
position biases, sinks and grouped heads are those of the model. Everything has a gradient.

It also registers two names for continuous batching (`model.generate_batch`), with packed queries. "paged|attngen" is for
versions that name such implementations so (5.18 does): keys are read from transformers' pages, in place. Later versions (5.24)
call only what has "flash" in its name, and give it copies of the keys: load the model as above, then set

    model.config._attn_implementation = "attngen_flash"

which is "attngen" by another name: `from_pretrained` looks for a package of flash-attention if it is given this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from attngen.optional import required
from attngen.plan.plan import WIDEST_HEAD

with required("torch", "attngen.transformers", "'attngen[transformers]'"):
    import torch
    from torch import Tensor

with required("transformers", "attngen.transformers", "'attngen[transformers]'"):
    import transformers

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(f"attngen.transformers requires transformers 5.0 or later; this is {transformers.__version__}")

from torch.nn.attention.flex_attention import BlockMask as TorchMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    padding_mask_function,
    prepare_padding_mask,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from attngen.device.arrays import ArgumentError, ArgumentTypeError
from attngen.torch import BlockMask, create_block_mask, flash_attn_varlen_func, flex_attention
from attngen.torch.block_mask import Function, Unread
from attngen.torch.private import LISTS

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

NAME = "attngen"
PAGED = f"paged|{NAME}"  # as transformers calls attention by pages
FLASH = f"{NAME}_flash"  # as it calls attention that needs no mask of packed sequences
KEYS_OF_STEPS = 128  # a bound of sequences' lengths in multiples of this: a launch is prepared once for many steps
SDPA = 'use attn_implementation="sdpa", with attngen.torch.activate() for attngen\'s kernels, or "eager"'
EAGER = 'use attn_implementation="eager", the only one of models of type {!r}'
UNREAD_OPTIONS = ("indices", "block_indices", "sinks")  # keys of sparse attention, and a sink for each row
IGNORES_MASKS = ("doge",)  # types of models whose code drops a mask that is not a tensor


def _instead(config: transformers.PretrainedConfig) -> str:
    """What to use for models of `config`, in words: `sdpa`, unless the model's class does not support it."""
    kinds = MODEL_MAPPING.get(type(config), None)
    kinds = kinds if isinstance(kinds, (list, tuple)) else [kinds]
    without = all(getattr(kind, "_supports_sdpa", True) is False for kind in kinds)
    return EAGER.format(config.model_type) if without else SDPA


class ModelMask(BlockMask):
    """The mask of a model: a function of positions that can be sliced as a tensor [batch, 1, q_len, kv_len].

    Other uses as a tensor raise ArgumentError or AttributeError. Most models that compute attention by their own code add the
    mask to their scores, so they would not use attngen. `to` moves the tensors that the function captures, once for each
    device: the layers of a model may be on several. `model` is the configuration of the model, for messages.
    """

    model: transformers.PretrainedConfig | None = None

    def __getitem__(self, index: object) -> ModelMask:
        parts = index if isinstance(index, tuple) else (index,)
        if not self.is_function or len(parts) > 4 or not all(isinstance(p, slice) and p.step in (None, 1) for p in parts):
            raise ArgumentError(
                f"the model reads elements of its mask, which attngen keeps as a function; {_instead(self.model)}"
            )
        ranges = [p.indices(n) for p, n in zip(parts, self.shape, strict=False)]
        ranges += [(0, n, 1) for n in self.shape[len(parts) :]]
        first = [start for start, _, _ in ranges]
        batch, heads, q_len, kv_len = (max(0, end - start) for start, end, _ in ranges)
        whole = self.mask_mod

        def part(*pair: Tensor) -> Tensor:
            return whole(*(one + start if start else one for one, start in zip(pair, first, strict=True)))

        assert self._described is not None
        return self._alike((q_len, kv_len), self._described._replace(batch=batch, heads=heads), part)

    def to(self, device: torch.device | torch.dtype | str) -> TorchMask:
        if isinstance(device, torch.dtype):
            raise ArgumentError(
                f"the model converts its mask to {device}, but attngen keeps the mask as a function; {_instead(self.model)}"
            )
        place = torch.device(device)
        if self._described is None:
            return super().to(device)
        if place == self._described.device:
            return self
        elsewhere = self.__dict__.setdefault("_elsewhere", {})
        if place not in elsewhere:
            described = self._described._replace(device=place, lists_on=place)
            elsewhere[place] = self._alike(self.seq_lengths, described, _moved(self.mask_mod, place))
        return elsewhere[place]

    def __getattr__(self, name: str) -> object:
        if name in LISTS:
            return super().__getattr__(name)
        raise AttributeError(
            f"the mask of attngen is a function of positions and has no attribute {name!r}; {_instead(self.model)}"
        )

    def _alike(self, lengths: tuple[int, int], described: Unread, mask_mod: Function | None = None) -> ModelMask:
        found = super()._alike(lengths, described, mask_mod)
        found.model = self.model
        return found

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> NoReturn:
        name = getattr(function, "__name__", function)
        values = [*args, *(kwargs or {}).values()]
        values += [one for some in values if isinstance(some, (list, tuple)) for one in some]
        model = next((one.model for one in values if isinstance(one, ModelMask)), None)
        raise ArgumentError(f"the model passes its mask to {name}, but attngen keeps the mask as a function; {_instead(model)}")


def _moved(value: Any, device: torch.device) -> Any:
    """`value`, a function or what a function captures, with all captured tensors on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(one, device) for one in value)
    if not isinstance(value, FunctionType) or value.__closure__ is None:
        return value
    cells = tuple(CellType(_moved(cell.cell_contents, device)) for cell in value.__closure__)
    return FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)


def mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    cache_position: Tensor | None = None,
    config: transformers.PretrainedConfig | None = None,
    **_: object,
) -> ModelMask:
    """The mask of a call, with the arguments of transformers' mask interface. It holds the function: nothing is evaluated.

    `attention_mask` is [batch, keys so far], true for tokens and false for padding. The offsets are the positions of the first
    query and the first key. Early versions of transformers give the positions of all queries instead, as `cache_position`
    [q_length], of which the first is not read on the host. Offsets that are tensors are copied: a cache counts its tokens in
    place, after the mask was made and before the attention reads it. Raises ArgumentError for models that would ignore it.
    """
    if (model_type := getattr(config, "model_type", None)) in IGNORES_MASKS:
        raise ArgumentError(f"models of type {model_type!r} ignore a mask that is not a tensor; {_instead(config)}")
    if cache_position is not None:
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            sizes = list(attention_mask.shape)
            raise ArgumentError(
                f"`attention_mask` is {sizes}; expected [batch, keys], or [batch, 1, queries, keys] for all pairs"
            )
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    offsets = (one.clone() if isinstance(one, torch.Tensor) else one for one in (q_offset, kv_offset))
    moved = add_offsets_to_mask_function(mask_function, *offsets)
    device = torch.device(device)
    described = Unread(batch_size, 1, device, separate_full_blocks=True, lists_on=device)
    found = ModelMask(seq_lengths=(q_length, kv_length), BLOCK_SIZE=(128, 128), mask_mod=moved, described=described)
    found.model = config
    return found


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """(output [batch, q_len, q_heads, head size], None), with the arguments of transformers' attention interface.

    query [batch or 1, q_heads, q_len, head size], key and value [batch or 1, kv_heads, kv_len, head size]. `attention_mask` is
    what `mask` gave, or a tensor [batch or 1, q_heads or 1, q_len or 1, kv_len or more]: boolean, true takes part; or float,
    added.
    `position_bias` is added to the scores in the same way, after the soft-cap. `s_aux` [q_heads] has a sink's logit for each
    head. Without a mask, a module is causal if its attribute `is_causal` says so, and `sliding_window` is the distance from
    which on keys take no part; a mask says so itself. `cu_seq_lens_q` int32 [sequences + 1] has the rows and keys at which
    packed sequences begin; each attends to itself. With `cu_seq_lens_k` and no mask, sequence i has the keys from
    cu_seq_lens_k[i] on, and its last row stands at its last key, as in continuous batching; no sequence has more than
    `max_length_q` rows and `max_length_k` keys. A `softcap` of 0 is none, as in flash-attention.
    `kernel_options={"mode": ...}` names a schedule. `dropout` is the share of weights that are dropped. Raises ArgumentError
    for the attention weights as an output, which no kernel has, for heads that are too large, and for sparse attention, whose
    keys a model selects by `indices` or `block_indices`.
    """
    config = getattr(module, "config", None)
    if options.get("output_attentions"):
        raise ArgumentError('no kernel has the attention weights as an output; use attn_implementation="eager" for them')
    if refused := [name for name in UNREAD_OPTIONS if options.get(name) is not None]:
        raise ArgumentError(f"attngen does not read the option `{refused[0]}` of this model's attention; {_instead(config)}")
    if (size := max(query.shape[3], value.shape[3])) > WIDEST_HEAD:
        raise ArgumentError(
            f"the model has heads of size {size}, and attngen's kernels at most {WIDEST_HEAD}; {_instead(config)}"
        )
    if query.shape[0] != key.shape[0] and 1 in (query.shape[0], key.shape[0]):
        batch = query.shape[0] * key.shape[0]
        query, key, value = (one.expand(batch, -1, -1, -1) for one in (query, key, value))
    if attention_mask is None and position_bias is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        begins, longest = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        others = {"dropout_p": dropout, "softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
        mode = (options.get("kernel_options") or {}).get("mode", "auto")
        return _of_packed(query, key, value, begins, longest, causal, sliding_window, mode=mode, **others), None
    block_mask, added = None, position_bias
    if added is not None:
        added = _expanded("position_bias", added, query, key)
    if isinstance(attention_mask, torch.Tensor):
        dense = _expanded("attention_mask", attention_mask, query, key)
        if dense.dtype == torch.bool:
            block_mask = _of_pairs(dense, query, key)
        else:
            added = dense if added is None else added + dense
    elif attention_mask is not None:
        block_mask = attention_mask
    else:
        causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        block_mask = _of_positions(causal, sliding_window, query, key)
    if cu_seq_lens_q is not None:
        block_mask = _of_sequences(block_mask, cu_seq_lens_q, query, key)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        return score if added is None else score + added[b, h, q, k]

    changes = bool(softcap) or added is not None
    output = flex_attention(
        query,
        key,
        value,
        score_mod if changes else None,
        block_mask,
        scaling,
        enable_gqa=True,
        kernel_options=options.get("kernel_options"),
        dropout_p=dropout,
        sinks=s_aux,
    )
    return output.transpose(1, 2).contiguous(), None


def _expanded(name: str, pairs: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A tensor of all pairs, [batch, q_heads, q_len, kv_len], from one that may have 1 instead of a size, and more keys. Raises
    ArgumentError."""
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if pairs.dtype != torch.bool and not pairs.is_floating_point():
        raise ArgumentTypeError(f"`{name}` has elements of {pairs.dtype}; expected torch.bool or floats, which are added")
    kept = pairs[..., : key.shape[2]]
    if kept.dim() != 4 or any(n not in (1, size) for n, size in zip(kept.shape, sizes, strict=True)):
        raise ArgumentError(f"`{name}` is {list(pairs.shape)}; expected {list(sizes)}, or 1 in place of a size")
    return kept.expand(sizes)


def _of_positions(causal: bool, window: int | None, query: Tensor, key: Tensor) -> BlockMask | None:
    """The mask of a call without one. A single query stands at the last key, as it has no causal mask."""
    functions = [causal_mask_function] if causal else []
    if window is not None:
        first = 0 if query.shape[2] > 1 else key.shape[2] - 1
        functions.append(lambda b, h, q, k: (q + first - k).abs() < window)
    return _of_functions(functions, query, key) if functions else None


def _of_sequences(mask: BlockMask | None, begins: Tensor, query: Tensor, key: Tensor) -> BlockMask:
    """`mask` within packed sequences that begin at the rows, and keys, `begins`. Raises ArgumentError."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        sizes = f"{query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys"
        raise ArgumentError(f"`cu_seq_lens_q` was given for {sizes}; expected one row, with as many keys as queries")
    if mask is not None and not (isinstance(mask, BlockMask) and mask.is_function):
        raise ArgumentError("`cu_seq_lens_q` was given with a mask of block lists; expected one that `mask` made, or a tensor")
    sequence = torch.bucketize(torch.arange(query.shape[2], device=begins.device), begins[1:], right=True)
    within = packed_sequence_mask_function(sequence[None])
    return _of_functions([within] if mask is None else [mask.mask_mod, within], query, key)


def _of_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: tuple[Tensor, Tensor],
    longest: tuple[int | None, int | None],
    causal: bool,
    window: int | None,
    **others: Any,
) -> Tensor:
    """The output [1, total, q_heads, head size] of packed sequences, whose rows and keys begin at `begins`. Raises
    ArgumentError."""
    if query.shape[0] != 1 or key.shape[0] != 1:
        raise ArgumentError(
            f"`cu_seq_lens_k` was given for {query.shape[0]} rows of queries and {key.shape[0]} of keys; expected one of each"
        )
    keys, values = (one.transpose(1, 2).squeeze(0) for one in (key, value))
    most = longest[1] or keys.shape[0]
    most = -(-most // KEYS_OF_STEPS) * KEYS_OF_STEPS
    of_rows, of_keys = (one.int() for one in begins)
    return _packed(query, keys, values, (of_rows, of_keys, longest[0] or query.shape[2], most), causal, window, **others)


def _packed(
    query: Tensor, keys: Tensor, values: Tensor, sequences: tuple[Any, ...], causal: bool, window: int | None, **others: Any
) -> Tensor:
    """`flash_attn_varlen_func` of `sequences`, its arguments after keys and values. Keys that are `window` or more away from a
    row take no part."""
    window_size = (-1, -1) if window is None else (window - 1, window - 1)
    how = {"causal": causal, "window_size": window_size, **others}
    output = flash_attn_varlen_func(query.transpose(1, 2).squeeze(0), keys, values, *sequences, **how)
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)


def _of_functions(functions: Sequence[Callable[..., Tensor]], query: Tensor, key: Tensor) -> BlockMask:
    return create_block_mask(and_masks(*functions), None, None, query.shape[2], key.shape[2], query.device)


def _of_pairs(dense: Tensor, query: Tensor, key: Tensor) -> BlockMask:
    """A boolean mask of all pairs as a mask function."""

    def takes_part(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return dense[b, h, q, k]

    batch, heads, q_len, kv_len = dense.shape
    return create_block_mask(takes_part, batch, heads, q_len, kv_len, query.device)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    cache: PagedAttentionCache | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | Mapping[str, Tensor] | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int | Mapping[str, int] = 0,
    read_index: Sequence[Tensor] = (),
    write_index: Sequence[Tensor] = (),
    **options: Any,
) -> tuple[Tensor, None]:
    """(output [1, total, q_heads, head size], None), with the arguments of transformers' continuous batching.

    query [1, q_heads, total, head size] and the new key and value [1, kv_heads, total, head size] are the rows of all
    sequences, one after another; they are causal. The new keys and values go to `cache`, transformers' PagedAttentionCache, at
    `write_index`; `read_index` says where the keys of all sequences are, one list for each group of layers. Layers without a
    window read the cache in place. Those with one get copies of the keys that are in the window, as the rows that are written
    may replace keys that are read. Raises ArgumentError without a cache, and for masks, biases and attention weights, which
    continuous batching does not have.
    """
    if cache is None or cu_seq_lens_q is None:
        raise ArgumentError(f'attn_implementation="{PAGED}" was called without a cache; use "{NAME}" outside of generate_batch')
    given = {
        "attention_mask": attention_mask,
        **{name: options.get(name) for name in ("position_bias", "output_attentions", *UNREAD_OPTIONS)},
    }
    if refused := [name for name, value in given.items() if value is not None and value is not False]:
        raise ArgumentError(f"continuous batching has no {', no '.join(refused)}; attention is causal there")
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    window = cache.sliding_windows[module.layer_idx]
    has_window, has_past = window != 1, bool(read_index[group].numel())
    if isinstance(cu_seq_lens_k, Mapping):
        kind = "sliding_attention" if has_window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]  # type: ignore[index]
    assert cu_seq_lens_k is not None
    in_place = has_past and not has_window
    reads = [index[:0] for index in read_index] if in_place else read_index  # with an empty index, the cache copies nothing
    keys, values = cache.update(key, value, module.layer_idx, reads, write_index)
    where: dict[str, Tensor] = {}
    if in_place:
        shape = (-1, cache.block_size, *cache.key_cache[layer].shape[1:])
        keys, values = cache.key_cache[layer].view(shape), cache.value_cache[layer].view(shape)
        most = -(-max_seqlen_k // cache.block_size)  # type: ignore[operator]
        max_seqlen_k = most * cache.block_size  # one length for many steps: a launch is prepared once for them
        where["block_table"] = _pages(read_index[group], cu_seq_lens_k, most, cache.block_size)
    sequences = cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k
    others = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, **where}
    return _packed(query, keys, values, sequences, True, window if has_window else None, **others), None


def _pages(read_index: Tensor, cu_seqlens: Tensor, most: int, page_size: int) -> Tensor:
    """The page table [batch, most] of keys whose rows in the cache are `read_index`, those of a sequence from cu_seqlens[b] on:
    of whole pages, each from its first row. Entries past a sequence's last page are any numbers."""
    steps = torch.arange(0, most * page_size, page_size, device=read_index.device)
    firsts = (cu_seqlens[:-1, None] + steps).clamp_(max=read_index.shape[0] - 1)
    return (read_index[firsts] // page_size).int()


AttentionInterface.register(NAME, attention)
AttentionInterface.register(FLASH, attention)
AttentionInterface.register(PAGED, paged_attention)
AttentionMaskInterface.register(NAME, mask)
AttentionMaskInterface.register(FLASH, mask)

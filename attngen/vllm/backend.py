"""The parts of a backend as vLLM's version 1 names them: a backend, the builder of a step's metadata, the attention of a layer.

A step has packed queries: prompts, pieces of prompts, and sequences that decode, one after another. Sequences with few rows
come first; they are one call, which splits keys over multiprocessors, and the others are another. Both read vLLM's pages in
place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from attngen.optional import required

with required("torch", "attngen.vllm", "'attngen[torch]'"):
    import torch
    from torch import Tensor

with required("vllm", "attngen.vllm", "vllm"):
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadata,
        AttentionMetadataBuilder,
        AttentionType,
        MultipleOf,
    )

from attngen.plan import ARCHES
from attngen.plan.plan import WIDEST_HEAD
from attngen.schedules import FEW_ROWS
from attngen.spec.scales import SOFTMAX_SCALE
from attngen.torch.append import NO_SCALES, Scales, appended
from attngen.torch.description import dtype_name
from attngen.torch.flash_attn import ends, flash_text, limits
from attngen.torch.runtime import runtime

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

QUANTIZED = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}  # types of caches
KEYS_STEP = 256  # the longest length of a step is rounded up to a multiple: a launch is prepared once for so many steps
PAGE_ROWS = 16  # a page has a multiple of so many

if not hasattr(AttentionBackend, "supported_kv_cache_layouts"):
    raise ImportError("attngen.vllm requires vLLM 0.33 or later, whose caches are [pages, heads, rows, K and V]")


class AttngenBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks of a backend before it uses it."""

    accept_output_buffer = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *QUANTIZED]

    @staticmethod
    def get_name() -> str:
        """Of the place in vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttngenImpl]:
        return AttngenImpl

    @staticmethod
    def get_builder_cls() -> type[AttngenMetadataBuilder]:
        return AttngenMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: AttentionSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_ROWS)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 8 <= head_size <= WIDEST_HEAD

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """A step is divided by the numbers of rows that the CPU has."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Whether attngen knows the architecture."""
        return f"sm_{capability.major}{capability.minor}" in {name.removesuffix("a") for name in ARCHES}


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences that one call computes: where their rows are, int32 [sequences + 1], their pages, int32 [sequences, most], and
    numbers of keys, int32 [sequences]; and lengths that none of them exceeds."""

    cu_seqlens: Tensor
    page_table: Tensor
    seqused: Tensor
    max_q_len: int
    max_kv_len: int


@dataclass
class AttngenMetadata(AttentionMetadata):  # type: ignore[misc]
    """A step, for all layers of a group. `slots` int32 [tokens] are the rows of the cache that new keys go to, counted over all
    pages; -1: none. vLLM adds attributes, for layers with chunked attention and for fast prefill."""

    slots: Tensor
    parts: tuple[Part, ...]


class AttngenMetadataBuilder(AttentionMetadataBuilder[AttngenMetadata]):  # type: ignore[misc]
    """Makes a step's metadata. CUDA graphs hold steps in which all sequences have the same number of rows."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int | None = FEW_ROWS  # rows of a sequence that vLLM is to put before those with more

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self._slots = torch.full((most,), -1, dtype=torch.int32, device=device)  # graphs read it at this address

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttngenMetadata:
        """The metadata of a step. Raises NotImplementedError for rows that see keys after them."""
        return self._build(common_attn_metadata, common_attn_metadata.max_seq_len)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> AttngenMetadata:
        """The same for a graph, which replays with sequences of any length that pages have room for."""
        pages = common_attn_metadata.block_table_tensor.shape[1]
        return self._build(common_attn_metadata, pages * self.kv_cache_spec.block_size)

    def _build(self, common: CommonAttentionMetadata, max_kv_len: int) -> AttngenMetadata:
        if common.causal is not True:
            raise NotImplementedError("attngen's backend for vLLM has causal attention alone; choose another backend")
        tokens, sequences = common.slot_mapping.shape[0], common.num_reqs
        if tokens > self._slots.shape[0]:
            raise ValueError(f"a step has {tokens} tokens; the scheduler's max_num_batched_tokens is {self._slots.shape[0]}")
        slots = self._slots[:tokens]
        slots.copy_(common.slot_mapping)
        begins = common.query_start_loc_cpu[: sequences + 1]
        rows = (begins[1:] - begins[:-1]).tolist()
        few = next((i for i, n in enumerate(rows) if n > FEW_ROWS), sequences)
        max_kv_len = -(-max_kv_len // KEYS_STEP) * KEYS_STEP

        def part(begin: int, end: int) -> Part:
            whole = (begin, end) == (0, sequences)
            return Part(
                common.query_start_loc[begin : end + 1],
                common.block_table_tensor[begin:end],
                common.seq_lens[begin:end],
                common.max_query_len if whole else max(rows[begin:end]),
                max_kv_len,
            )

        ranges = ((0, few), (few, sequences))
        return AttngenMetadata(slots, tuple(part(begin, end) for begin, end in ranges if begin < end))


class AttngenImpl(AttentionImpl[AttngenMetadata]):  # type: ignore[misc]
    """The attention of a layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: object,
    ) -> None:
        wanted = [f"{name}={value!r}" for name, value in others.items() if value]
        if kv_cache_dtype not in AttngenBackend.supported_kv_cache_dtypes:
            wanted.append(f"kv_cache_dtype={kv_cache_dtype!r}")
        if attn_type != AttentionType.DECODER:
            wanted.append(f"attn_type={attn_type!r}")
        if sliding_window is not None and sliding_window < 1:
            wanted.append(f"sliding_window={sliding_window!r}")
        if wanted:
            raise NotImplementedError(f"attngen's backend for vLLM has no {', no '.join(wanted)}; choose another backend")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sinks = sinks
        self._slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._window = limits((-1 if sliding_window is None else sliding_window - 1, -1), True)
        self._softcap = logits_soft_cap or 0.0
        self._writes = kv_sharing_target_layer_name is None  # else another layer's keys are read

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: AttngenMetadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """`output` [tokens, heads * size], or of three dimensions; rows of no sequence are not written.

        query [tokens, heads, size], key and value [tokens, kv_heads, size] are the step's rows. kv_cache [pages, kv_heads,
        rows, 2 * size] has a row of V behind each of K, in any of vLLM's layouts. New keys and values are first written to it;
        one of 8 bits takes them divided by the layer's scales. Without metadata vLLM measures memory: the output is 0.
        """
        if output is None or output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attngen's backend for vLLM writes to an output of the model's element type alone")
        if attn_metadata is None:
            return output.fill_(0)
        scales = NO_SCALES
        if self.kv_cache_dtype in QUANTIZED:  # vLLM has their bits as bytes
            kv_cache = kv_cache.view(QUANTIZED[self.kv_cache_dtype])
            scales = Scales(*(one.detach().float().reshape(1, 1, -1) for one in (layer._k_scale, layer._v_scale)))
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)  # [pages, rows, kv_heads, size]
        if self._writes and key is not None and value is not None:
            tokens = attn_metadata.slots.shape[0]
            rows = key[:tokens].unsqueeze(1), value[:tokens].unsqueeze(1)
            table = every_page(k_cache.shape[0], k_cache.device).expand(tokens, -1)
            appended(rows[0], *rows, k_cache, v_cache, attn_metadata.slots, table, scales=scales)
        if self._slopes is not None and self._slopes.device != query.device:
            self._slopes = self._slopes.to(query.device)
        captured = [t.detach() for t in (self._slopes, self.sinks) if t is not None]
        captured += [one[0] for one in scales if one is not None]  # [1, kv_heads or 1]
        window = [n for n in self._window if n >= 0]
        run, out = runtime(self._text(query.dtype, k_cache), query.device), output.view(-1, self.num_heads, self.head_size)
        pools = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        for part in attn_metadata.parts:
            where = (part.cu_seqlens, part.page_table, part.seqused)
            run((query, *pools, *where, *captured), (part.max_q_len, part.max_kv_len, *window), (self.scale,), outputs=(out,))
        return output

    def _text(self, dtype: torch.dtype, cache: Tensor) -> str:
        """The spec's text. It states the size of pages that are whole rows apart, as TMA needs them: padded ones may not be."""
        page_size = cache.shape[1] if cache.stride(0) % cache.stride(1) == 0 else None
        sinks = None if self.sinks is None else dtype_name(self.sinks.dtype)
        alibi_rank, size = 0 if self._slopes is None else 1, self.head_size
        return flash_text(
            "auto", "packed_paged", True, ends(*self._window), self._softcap, alibi_rank, SOFTMAX_SCALE, False, dtype, size,
            size, page_size=page_size, sinks=sinks, kv_dtype=cache.dtype, scaled=(self.kv_cache_dtype in QUANTIZED,) * 2,
        )  # fmt: skip


@lru_cache(maxsize=64)
def every_page(count: int, device: torch.device) -> Tensor:
    """The numbers of all pages, int32 [1, count]: a page table by which a row's number over all pages is a position."""
    return torch.arange(count, dtype=torch.int32, device=device).unsqueeze(0)

"""Latent attention (MLA: DeepSeek-V2 and later, Kimi K2) as a backend of vLLM's version 1: what decodes, read from its pages.

vLLM's classes for latent attention project, cache and compute prompts, by a prefill backend of theirs. This one computes the
absorbed form: a row of the cache is a key of `kv_lora_rank + qk_rope_head_dim` columns, of which the first `kv_lora_rank` are
the value, and all query heads share it. Sequences with up to FEW_ROWS rows are computed so, others as prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attngen.optional import required

with required("torch", "attngen.vllm", "'attngen[torch]'"):
    import torch
    from torch import Tensor

with required("vllm", "attngen.vllm", "vllm"):
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonBackend,
        MLACommonDecodeMetadata,
        MLACommonImpl,
        MLACommonMetadata,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from attngen.schedules import FEW_ROWS
from attngen.spec.scales import SOFTMAX_SCALE
from attngen.torch.description import Description, dtype_name, one_line
from attngen.torch.runtime import runtime
from attngen.vllm.backend import KEYS_STEP, PAGE_ROWS, AttngenBackend

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec


class AttngenLatentBackend(MLACommonBackend):  # type: ignore[misc]
    """What vLLM asks of a backend before it uses it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = AttngenBackend.supported_dtypes
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Of the place in vLLM's registry."""
        return AttngenBackend.get_name()

    @staticmethod
    def get_impl_cls() -> type[AttngenLatentImpl]:
        return AttngenLatentImpl

    @staticmethod
    def get_builder_cls() -> type[AttngenLatentMetadataBuilder]:
        return AttngenLatentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: AttentionSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_ROWS)]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Whether attngen knows the architecture."""
        return AttngenBackend.supports_compute_capability(capability)


@dataclass
class AttngenLatentDecode(MLACommonDecodeMetadata):  # type: ignore[misc]
    """What decodes in a step: where the rows of its sequences are, int32 [sequences + 1], and lengths that none exceeds."""

    cu_seqlens: Tensor
    max_q_len: int
    max_kv_len: int


class AttngenLatentMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata[AttngenLatentDecode]]):  # type: ignore[misc]
    """Makes a step's metadata. CUDA graphs hold steps in which all sequences have the same number of rows."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = FEW_ROWS  # rows of a sequence up to which it decodes

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MLACommonMetadata[AttngenLatentDecode]:
        """The metadata for a graph, which replays with sequences of any length that pages have room for."""
        step = super().build_for_cudagraph_capture(common_attn_metadata)
        if step.decode is not None:
            step.decode.max_kv_len = step.decode.block_table.shape[1] * self.kv_cache_spec.block_size
        return step

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> AttngenLatentDecode:
        return AttngenLatentDecode(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            cu_seqlens=query_start_loc_device,
            max_q_len=max(max_query_len, 1),
            max_kv_len=-(-max_seq_len // KEYS_STEP) * KEYS_STEP,
        )


class AttngenLatentImpl(MLACommonImpl[MLACommonMetadata[AttngenLatentDecode]]):  # type: ignore[misc]
    """The attention of a layer."""

    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: object,
    ) -> None:
        given = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        wanted = [f"{name}={value!r}" for name, value in given.items() if value]
        if kv_cache_dtype not in AttngenLatentBackend.supported_kv_cache_dtypes:
            wanted.append(f"kv_cache_dtype={kv_cache_dtype!r}")
        if attn_type != AttentionType.DECODER:
            wanted.append(f"attn_type={attn_type!r}")
        if wanted:
            what = ", no ".join(wanted)
            raise NotImplementedError(f"attngen's latent attention for vLLM has no {what}; choose another backend")
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, **latent,
        )  # fmt: skip

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata[AttngenLatentDecode],
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor | None]:
        """(O [rows, heads, kv_lora_rank], lse [rows, heads] in fp32 if the layer returns it).

        q is [rows, heads, kv_lora_rank + qk_rope_head_dim], or its two parts; the cache [pages, rows of a page, the same
        columns]. Raises NotImplementedError where ranks of a decode context parallel group share the keys.
        """
        decode = attn_metadata.decode
        assert decode is not None
        if decode.dcp_tot_seq_lens is not None:
            raise NotImplementedError(
                "attngen's latent attention for vLLM has no decode context parallelism; choose another backend"
            )
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        lse = bool(self.need_to_return_lse_for_decode)
        pool = kv_c_and_k_pe_cache.unsqueeze(1)  # one head
        values = pool[..., : self.kv_lora_rank]
        where = (decode.cu_seqlens, decode.block_table, decode.seq_lens)
        run = runtime(latent_text(queries.dtype, self.num_heads, pool, self.kv_lora_rank, lse), queries.device)
        output, *others = run((queries, pool, values, *where), (decode.max_q_len, decode.max_kv_len), (float(self.scale),))
        return output, others[0].transpose(0, 1) if lse else None


def latent_text(dtype: torch.dtype, heads: int, pool: Tensor, columns: int, lse: bool) -> str:
    """The text of causal attention over `pool` [pages, 1, rows, size], whose first `columns` are the values. It states
    the heads, by which a block has more rows or fewer, and the size of pages that are whole rows apart, as TMA needs them."""
    _, _, rows, size = pool.shape
    keywords = {
        "mask": "q + kv_len - q_len >= k",
        "values": (0, columns),
        "heads": (heads, 1),
        "storage": "packed_paged",
        "page_size": rows if pool.stride(0) % pool.stride(2) == 0 else None,
    }
    spec = Description("auto", False, SOFTMAX_SCALE, lse, keywords).spec(dtype_name(dtype), size, columns, None)
    return one_line(spec)

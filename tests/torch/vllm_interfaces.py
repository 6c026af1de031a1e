"""Stand-ins of what vLLM's plugins import from it: names and signatures of the interfaces of 0.33, without what they do."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class AttentionType(StrEnum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class AttentionBackend(ABC):
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        return None


class AttentionMetadata:
    pass


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @abstractmethod
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> T: ...

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> T:
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
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
    ) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: T,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


class QueryLenSupport(Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend(AttentionBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


@dataclass
class MLACommonDecodeMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


@dataclass
class MLACommonMetadata(AttentionMetadata, Generic[T]):
    num_reqs: int
    num_decodes: int
    num_decode_tokens: int
    decode: T | None = None


class MLACommonMetadataBuilder(AttentionMetadataBuilder[T]):
    query_len_support = QueryLenSupport.SINGLE_ONLY
    reorder_batch_threshold: int = 1

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        metadata_cls: Any = None,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.metadata_cls = metadata_cls or MLACommonMetadata

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> T:
        """Of the sequences with few rows alone, which come first."""
        common = common_attn_metadata
        begins = common.query_start_loc_cpu
        rows = (begins[1:] - begins[:-1]).tolist()
        count = next((i for i, n in enumerate(rows) if n > self.reorder_batch_threshold), len(rows))
        decode = self._build_decode(
            block_table_tensor=common.block_table_tensor[:count], seq_lens_device=common.seq_lens[:count],
            max_seq_len=common.max_seq_len, query_start_loc_cpu=begins[: count + 1],
            query_start_loc_device=common.query_start_loc[: count + 1], num_decode_tokens=int(begins[count]),
            max_query_len=min(common.max_query_len, self.reorder_batch_threshold), dcp_tot_seq_lens_device=None,
        ) if count else None  # fmt: skip
        made: T = self.metadata_cls(
            num_reqs=common.num_reqs, num_decodes=count, num_decode_tokens=int(begins[count]), decode=decode
        )
        return made


class MLACommonImpl(ABC, Generic[T]):
    need_to_return_lse_for_decode = False

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
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, kv_cache_dtype
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim

    @abstractmethod
    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: T, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


class AttentionBackendEnum(Enum):
    CUSTOM = None

    def get_path(self, include_classname: bool = True) -> str:
        return OVERRIDES[self]

    def is_overridden(self) -> bool:
        return self in OVERRIDES


OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: AttentionBackendEnum, class_path: str | None = None, is_mamba: bool = False) -> Any:
    assert class_path is not None
    OVERRIDES[backend] = class_path
    return lambda cls: cls


def modules() -> dict[str, ModuleType]:
    """By the names under which vLLM has them."""
    here = sys.modules[__name__]
    attention = "vllm.v1.attention"
    parts = {f"{attention}.backend": here, f"{attention}.backends.registry": here}
    layers = "vllm.model_executor.layers"
    parts[f"{layers}.attention.mla_attention"] = here
    packages = (
        "vllm", "vllm.v1", attention, f"{attention}.backends", "vllm.model_executor", layers, f"{layers}.attention",
    )  # fmt: skip
    return {name: ModuleType(name) for name in packages} | parts


def config(most_tokens: int) -> Any:
    """Of an engine, as far as builders read it."""
    return SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=most_tokens))

"""attngen as an attention backend of Hugging Face's diffusers, by one import.

    import attngen.diffusers
    pipeline.transformer.set_attention_backend("attngen")

The import adds "attngen" to the names of diffusers' dispatcher (0.36 or later), so that `set_attention_backend`,
`attention_backend("attngen")` and DIFFUSERS_ATTN_BACKEND accept it. Masks, grouped heads, scales and dropout are those of the
call; everything has a gradient. diffusers' context parallelism is not supported.
"""

from __future__ import annotations

from attngen.optional import required

with required("torch", "attngen.diffusers", "'attngen[diffusers]'"):
    from torch import Tensor

with required("diffusers", "attngen.diffusers", "'attngen[diffusers]'"):
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from attngen.device.arrays import ArgumentError
from attngen.torch import attention

NAME = "attngen"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: object = None,
) -> Tensor:
    """O [batch, q_len, heads, head_dim_v] of query [batch, q_len, heads, head_dim], key [batch, kv_len, kv_heads, head_dim] and
    value [batch, kv_len, kv_heads, head_dim_v], as diffusers' own backends compute it. `attn_mask` is that of torch's
    scaled_dot_product_attention, or [batch, kv_len]. Raises ArgumentError."""
    if _parallel_config is not None:
        raise ArgumentError('the backend "attngen" has no context parallelism; set_attention_backend("native") does')
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    return attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, layout="bshd", copy=True
    )  # fmt: skip


def _member() -> AttentionBackendName:
    """The member of diffusers' enumeration of backends with attngen's name, which is added if there is none: enumerations that
    have members cannot be extended otherwise."""
    if NAME in {one.value for one in AttentionBackendName}:
        return AttentionBackendName(NAME)
    member = str.__new__(AttentionBackendName, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    AttentionBackendName._member_names_.append(member._name_)
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[NAME] = member
    return member


_AttentionBackendRegistry.register(_member())(attend)

"""`attention` and the module `Attention` for torch, and the operator that both call, `torch.ops.attngen.attention`.

    import attngen.torch
    o = attngen.torch.attention(q, k, v, is_causal=True)
    layer = attngen.torch.Attention(mask="causal and window(1024)")
    o = layer(q, k, v)
    with attngen.torch.activated():  # models that call torch's scaled_dot_product_attention
        model(x)

Everything works in eager mode, under `torch.compile(fullgraph=True)`, in `torch.export`, and in CUDA graphs, and has gradients:
by every tensor that requires grad, captured ones too.
"""

from attngen.optional import required

with required("torch", "attngen.torch", "'attngen[torch]'"):
    import torch

if torch.torch_version.TorchVersion(torch.__version__) < "2.10":
    raise ImportError(f"attngen.torch requires torch 2.10 or later; this is torch {torch.__version__}")

from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

from attngen.torch import autograd as autograd  # registers the operator's derivatives
from attngen.torch import batching as batching  # registers what torch.vmap does of it
from attngen.torch import compiled as compiled  # registers compiled specs as callables of tensors
from attngen.torch import flops as flops  # registers what the operators cost
from attngen.torch.block_mask import BlockMask, create_block_mask
from attngen.torch.check_indices import checked_indices
from attngen.torch.flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from attngen.torch.flex import flex_attention
from attngen.torch.functional import attention
from attngen.torch.kv_cache import flash_attn_with_kvcache
from attngen.torch.load_balance import TileBalancer
from attngen.torch.merging import merge
from attngen.torch.module import Attention
from attngen.torch.replacement import NotReplacedWarning, activate, activated, restore
from attngen.torch.rotary import rotary_tables
from attngen.torch.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    varlen_attn,
    varlen_attn_out,
)

__all__ = [
    "Attention",
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "NotReplacedWarning",
    "TileBalancer",
    "activate",
    "activated",
    "and_masks",
    "attention",
    "checked_indices",
    "create_block_mask",
    "create_mask",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "merge",
    "noop_mask",
    "or_masks",
    "restore",
    "rotary_tables",
    "varlen_attn",
    "varlen_attn_out",
]

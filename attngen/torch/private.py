"""Private interfaces of torch, all that attngen uses, by names of its own, and what each is used for.

torch may change them in any release. They were seen in torch 2.11 and 2.13; what is not marked otherwise has been there since
2.10. Without one that has no substitute here, importing attngen.torch raises an ImportError that names it, and so does the
first use of those that are imported late. `tests/torch/test_private.py` compares their parameters with those that attngen
passes, so that it fails first, and in words, if a release changes one.

Other modules also read private attributes of torch's objects: `_schema` of an operator (its name, and whether it changes an
argument), `_version` of a tensor (how often it was written to), `_adjust` of a BlockMask, `_current_level` of `forward_ad`, and
`_materialize` of a bias of torch.nn.attention.bias. `TileBalancer` has the one method that torch's context parallelism calls of
a load balancer, `_generate_indices`: `tests/torch/test_load_balance.py` compares it with torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


@contextmanager
def _named() -> Iterator[None]:
    """Raises ImportError for what torch lacks."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"attngen.torch uses a private interface of torch that torch {torch.__version__} does not have ({error}); use a "
            "release from 2.10 to 2.13, or a later version of attngen"
        ) from error


with _named():
    # Eager calls: whether torch's dispatcher may be skipped.
    from torch.autograd import forward_ad as forward_ad  # `_current_level`: -1 outside of forward-mode differentiation

    eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None or False: Dynamo traces no frame

    autocasts = torch._C._is_any_autocast_enabled
    transforms_active = torch._C._are_functorch_transforms_active
    function_modes = torch._C._len_torch_function_stack
    profiles = torch._C._autograd._profiler_enabled
    included_keys = torch._C._dispatch_tls_local_include_set  # dispatch keys of modes and transforms of this thread
    # Those that are always included, and see no call: any other key traces, transforms or replaces calls.
    USUAL_KEYS: int = (
        torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
        | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    ).raw_repr()

    # Autograd in transforms of torch.func: functions of a single level, as torch makes them for autograd.Function.
    import torch._functorch.utils
    from torch.autograd.function import _SingleLevelFunction

    single_level_functions = torch._functorch.utils.enable_single_level_autograd_function
    set_forward_gradients = forward_ad._set_fwd_grad_enabled
    BelowAutograd = torch._C._AutoDispatchBelowAutograd

    class SingleLevelFunction(_SingleLevelFunction):
        """A function of a single level of torch.func, which compiled autograd can trace as any torch.autograd.Function."""

        _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)

    # torch.vmap's older form, of torch.autograd.grad(..., is_grads_batched=True): its levels and tensors.
    leave_vmap, enter_vmap = torch._C._vmapmode_decrement_nesting, torch._C._vmapmode_increment_nesting
    without_batch_dim, with_batch_dim = torch._remove_batch_dim, torch._add_batch_dim

    # Graphs of masks and scores: tensors without memory, modes that refuse, and the state of other traces, which is set aside.
    import torch._functorch.pyfunctorch
    from torch._decomp import decomposition_table as decomposition_table
    from torch._guards import tracing as tracing
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_only as tree_map_only

    outside_of_transforms = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
    outside_of_modes = torch.utils._python_dispatch._disable_current_modes
    is_of_transform = torch._C._functorch.is_functorch_wrapped_tensor
    jit_trace, set_jit_trace = torch._C._get_tracing_state, torch._C._set_tracing_state  # type: ignore[attr-defined]
    # What Dynamo calls for symbols, by the function of tensors that does the same.
    SYMBOLIC = {getattr(torch, f"_sym_{name}"): getattr(torch, name) for name in ("cos", "log2", "sin", "sqrt", "tan", "tanh")}

    # flex_attention as torch's: its checks and errors, the functions that stand for no mask and no score, lists of blocks.
    from torch.nn.attention import flex_attention as _flex

    check_input, check_sizes, warn_once = _flex._validate_sdpa_input, _flex._validate_embed_dim, _flex._warn_once  # type: ignore[attr-defined]
    no_score, mask_of_slice = _flex._identity, _flex._sliced_mask_mod_error
    ONE_BLOCK = _flex._LARGE_SPARSE_BLOCK_SIZE  # the size of a block of all pairs, for a call without a mask
    LISTS = tuple(_flex.BlockMask._TENSOR_ATTRS)
    blocks_of_mask, mask_of_blocks = _flex._convert_mask_to_block_mask, _flex._create_sparse_block_from_block_mask

    # scaled_dot_product_attention as torch made it, and the operator that distributed tensors divide among devices.
    torchs_attention = torch._C._nn.scaled_dot_product_attention
    flash_operator = torch.ops.aten._scaled_dot_product_flash_attention

# Launches. Builds without CUDA lack them; without them in another build, torch's public functions cost a call some 0.5 us.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def constant_to_dynamo(function: Any) -> None:
    """Makes torch.compile call `function` while it traces and keep the result: torch.compiler.assume_constant_result, without
    its import of torch._dynamo, which takes as long as all other imports of attngen.torch. If torch no longer reads the
    attribute, Dynamo traces into the function."""
    function._dynamo_marked_constant = True


def before_dynamo(function: object) -> Callable[..., object] | None:
    """The function that torch.compile or torch.compiler.disable has wrapped in `function`; None if it is no such wrapper."""
    return getattr(function, "_torchdynamo_orig_callable", None)


def remove(library: torch.library.Library) -> None:
    """Takes a library's kernels out of torch, as the end of its life would."""
    library._destroy()


def functions_of(operator: Any) -> tuple[Any, Any]:
    """The Python functions of somebody's operator, each None if it has none: that of torch.library.custom_op, and the one that
    is registered for fake tensors."""
    with _named():
        from torch._library.custom_ops import OPDEFS
        from torch._library.simple_registry import singleton

        made, fake = OPDEFS.get(operator._schema.name), singleton.find(operator._schema.name).fake_impl.kernel
        return made and made._init_fn, fake and fake.func


def items_as_indices() -> AbstractContextManager[object]:
    """A mode in which `t[i]` reads element i, a number that is traced, instead of waiting for it on the host. It imports
    torch._dynamo and sympy, in a second."""
    with _named():
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()

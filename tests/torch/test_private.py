"""Private interfaces of torch: that each exists, takes what attngen passes, and does what attngen relies on."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attngen  # noqa: E402
from attngen.torch import private  # noqa: E402

PACKAGE = Path(attngen.__file__).parent
IMPORTED = {"AbstractContextManager", "Any", "Callable", "Iterator", "annotations", "contextmanager"}
OWN = {"SingleLevelFunction", "before_dynamo", "constant_to_dynamo", "functions_of", "items_as_indices", "remove"}
A, B = "a", "b"  # stand for tensors and functions
# What attngen passes, for interfaces whose parameters Python knows.
PASSED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "blocks_of_mask": ((A, 128, 128, True), {}),
    "check_input": ((A, A, A), {"allow_lowp_kv": True}),
    "check_sizes": ((A, A, A), {}),
    "current_device": ((), {}),
    "HigherOrderOperator": (("name",), {}),
    "mask_of_blocks": (((A, A), B, (1, 1), 128, 128), {}),
    "mask_of_slice": ((A, A, A, A), {}),
    "no_score": ((A, A, A, A, A), {}),
    "outside_of_modes": ((), {}),
    "outside_of_transforms": ((), {}),
    "raw_stream": ((0,), {}),
    "set_forward_gradients": ((True,), {}),
    "single_level_functions": ((), {}),
    "TorchDispatchMode": ((), {}),
    "tracing": ((None,), {}),
    "tree_leaves": (((A, B),), {}),
    "tree_map_only": ((torch.Tensor, B, (A, B)), {}),
    "warn_once": (("id", "text"), {"category": FutureWarning}),
}


def _counts_levels() -> bool:
    level = private.enter_vmap()
    try:
        tensor = private.with_batch_dim(torch.zeros(3, 2), 0, level)
        return tensor.shape == (2,) and private.without_batch_dim(tensor, level, 3, 0).shape == (3, 2)
    finally:
        private.leave_vmap()


def _is_below_autograd() -> bool:
    with private.BelowAutograd():
        return not (torch.ones(1, requires_grad=True) * 2).requires_grad


def _counts_function_modes() -> bool:
    with torch.overrides.TorchFunctionMode():
        return bool(private.function_modes() > 0) and private.function_modes is torch._C._len_torch_function_stack


def _sees_transforms() -> bool:
    seen = []
    torch.vmap(lambda t: seen.append((private.transforms_active(), private.is_of_transform(t))) or t)(torch.zeros(2))
    return seen == [(True, True)] and not private.transforms_active() and not private.is_of_transform(torch.zeros(2))


def _sees_profiles() -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return bool(private.profiles())


def _sees_autocast() -> bool:
    with torch.autocast("cpu", torch.bfloat16):
        return bool(private.autocasts()) is True


def _sees_modes() -> bool:
    usual = private.included_keys().raw_repr() & ~private.USUAL_KEYS
    with private.TorchDispatchMode():
        return usual == 0 and private.included_keys().raw_repr() & ~private.USUAL_KEYS != 0


def _sees_forward_levels() -> bool:
    outside = private.forward_ad._current_level
    with private.forward_ad.dual_level():
        return outside == -1 and private.forward_ad._current_level == 0


def _sees_jit() -> bool:
    outside, seen = private.jit_trace(), []

    def recorded(t: Any) -> Any:
        state = private.jit_trace()
        private.set_jit_trace(None)
        seen.append(state is not None and private.jit_trace() is None)
        private.set_jit_trace(state)
        return t + 1

    torch.jit.trace(recorded, torch.zeros(2), check_trace=False)
    return outside is None and seen == [True]


# What attngen relies on, for the others.
MEANS: dict[str, Callable[[], bool]] = {
    **dict.fromkeys(("enter_vmap", "leave_vmap", "with_batch_dim", "without_batch_dim"), _counts_levels),
    **dict.fromkeys(("transforms_active", "is_of_transform"), _sees_transforms),
    **dict.fromkeys(("jit_trace", "set_jit_trace"), _sees_jit),
    **dict.fromkeys(("included_keys", "USUAL_KEYS"), _sees_modes),
    "autocasts": _sees_autocast,
    "BelowAutograd": _is_below_autograd,
    "decomposition_table": lambda: torch.ops.aten.addcmul.default in private.decomposition_table,
    "eval_frame_callback": lambda: private.eval_frame_callback() in (None, False),
    "FakeTensor": lambda: issubclass(private.FakeTensor, torch.Tensor),
    "flash_operator": lambda: "dropout_p" in str(private.flash_operator.default._schema),
    "forward_ad": _sees_forward_levels,
    "function_modes": _counts_function_modes,
    "LISTS": lambda: {"kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"} <= set(private.LISTS),
    "ONE_BLOCK": lambda: private.ONE_BLOCK > 2**20,
    "OpOverload": lambda: isinstance(torch.ops.aten.add.Tensor, private.OpOverload),
    "profiles": _sees_profiles,
    "SYMBOLIC": lambda: private.SYMBOLIC[torch._sym_sqrt] is torch.sqrt,
    "torchs_attention": lambda: private.torchs_attention is torch.nn.functional.scaled_dot_product_attention,
}


def test_each_private_interface_is_checked() -> None:
    names = {name for name in vars(private) if not name.startswith("_")} - IMPORTED
    assert names - {"torch"} == OWN | PASSED.keys() | MEANS.keys()


@pytest.mark.parametrize("name", PASSED)
def test_it_takes_what_attngen_passes(name: str) -> None:
    interface = getattr(private, name)
    arguments, named = PASSED[name]
    try:
        parameters = inspect.signature(interface)
    except ValueError:
        pytest.skip("a function of C: the builds with CUDA have it")
    try:
        parameters.bind(*arguments, **named)
    except TypeError as error:
        pytest.fail(
            f"torch {torch.__version__} has changed {interface}: {parameters} does not take what attngen passes: {error}"
        )


@pytest.mark.parametrize("name", MEANS)
def test_it_means_what_attngen_relies_on(name: str) -> None:
    assert MEANS[name](), (
        f"torch {torch.__version__} has changed {getattr(private, name)}: see the module attngen.torch.private"
    )


def test_what_is_imported_late_exists() -> None:
    with private.items_as_indices():
        assert torch.arange(3)[torch.tensor(1)] == 1
    body, fake = private.functions_of(torch.ops.attngen.attention.default)
    assert body is None
    assert fake is not None
    assert private.functions_of(torch.ops.aten.add.Tensor) == (None, None)


def test_the_function_that_dynamo_wrapped_is_found() -> None:
    assert private.before_dynamo(torch.compiler.disable(_sees_jit)) is _sees_jit
    assert private.before_dynamo(torch.compile(_sees_jit)) is _sees_jit
    assert private.before_dynamo(_sees_jit) is None


def test_a_missing_interface_is_named() -> None:
    for missing in ("from torch._ops import NoSuchOperator", "torch._C._no_such_function"):
        with (
            pytest.raises(ImportError, match=r"uses a private interface of torch .*[nN]o_?[sS]uch.*; use a release"),
            private._named(),
        ):
            exec(missing, {"torch": torch})


def test_no_other_module_uses_one() -> None:
    private_names = re.compile(
        r"\btorch\.(?:\w+\.)*_[a-zA-Z]\w*\.?\w*|from torch[\w.]*\._\w+ import|from torch[\w.]* import .*\b_\w+|\btheirs\._\w+"
    )
    allowed = {"torch/layout.py": 1, "torch/closures.py": 1, "bench/peers.py": 1}  # a comment, a module's name, Dynamo's reset
    found = {
        str(file.relative_to(PACKAGE)): len(uses)
        for file in PACKAGE.rglob("*.py")
        if file.name != "private.py" and (uses := private_names.findall(file.read_text("utf-8")))
    }
    assert found == allowed


def test_nothing_is_written_to_what_a_starred_name_was_given() -> None:
    """Dynamo of torch 2.11 makes it a tuple."""
    written = []
    for path in sorted(PACKAGE.joinpath("torch").rglob("*.py")):
        for function in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)):
            nodes = [n for n in ast.walk(function) if isinstance(getattr(n, "ctx", None), ast.Store)]
            starred = {ast.unparse(n.value) for n in nodes if isinstance(n, ast.Starred)}
            items = (ast.unparse(n.value) for n in nodes if isinstance(n, ast.Subscript))
            written += [f"{path.name}: {name}" for name in items if name in starred]
    assert not written

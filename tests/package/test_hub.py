"""The functions of torch tensors of a library as a repository of Hugging Face's kernels, on the emulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.language import load_text
from attngen.package.functions import Request, packaged
from attngen.package.library import library
from attngen.plan import ARCHES
from tests.package.libraries import emulated, extension_prints, library_of, needs_compiler

SPECS = """
attention plain { dtype fp32 head_dim 16 param scaling: float = 0.5 input slopes: fp32[heads] mask q >= k
                  score s * scaling + slopes[h] * float(k - q) output lse }
attention part { dtype fp32 head_dim 24 values k[8:24] mask q >= k output lse }
attention packed { dtype fp32 head_dim 16 mask causal_bottom_right kernel auto { storage packed } }
"""

WITH_TORCH = """
import importlib.util
import sys
import torch
from tests.package.on_gpu import OnGpu, workspace_of

# the package, with the extension beside it and the memory of the CPU in place of a GPU's
import attngen_kernels
sys.modules["hub.attngen_kernels"] = attngen_kernels
spec = importlib.util.spec_from_file_location("hub", HUB, submodule_search_locations=[])
hub = sys.modules["hub"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub)


def run(function, arrays, numbers):
    arrays = {name: OnGpu(array.detach()) for name, array in arrays.items()}
    size = getattr(attngen_kernels, function + "_workspace_bytes")(**arrays, **numbers)
    getattr(attngen_kernels, function)(**arrays, **numbers, workspace=workspace_of(size), stream=0)


try:
    hub.part(*2 * [torch.zeros(1, 1, 1, 24)])
except ValueError as error:
    assert "not in the memory of a GPU" in str(error)
else:
    raise AssertionError
hub._run = run
try:
    hub.part(torch.zeros(24), torch.zeros(24))
except ValueError as error:
    assert str(error) == "`q` has 1 dimensions; expected 4"
else:
    raise AssertionError
torch.manual_seed(0)


def leaves(*shapes):
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def attention(q, k, v, bias=0.0, scale=None):
    "O and lse in float64."
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    s = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    s = s.masked_fill(torch.ones(rows, keys, dtype=torch.bool).tril().logical_not(), -torch.inf)
    return s.softmax(-1) @ v.double(), s.logsumexp(-1)


def same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=3e-5, rtol=3e-5)


# params, captured tensors, two results, gradients that come through either or both, a layout of their own
q, k, v, slopes = leaves((2, 4, 21, 16), (2, 2, 21, 16), (2, 2, 21, 16), (4,))
distance = torch.arange(21)[None, :] - torch.arange(21)[:, None]
expected = attention(q, k, v, slopes[:, None, None].double() * distance, 0.7 / 4)
found = hub.plain(q, k, v, slopes, scaling=0.7)
same(found, expected)
weights = [torch.randn(2, 21, 4, 16).transpose(1, 2), torch.randn(2, 4, 21)]
for used in ((0, 1), (0,), (1,)):
    both = [sum((o * weights[i]).sum() for i, o in enumerate(one) if i in used) for one in (found, expected)]
    same(*(torch.autograd.grad(x, (q, k, v, slopes), retain_graph=True, materialize_grads=True) for x in both))
same(torch.autograd.grad(found[0].sum(), (k,), retain_graph=True), torch.autograd.grad(expected[0].sum(), (k,)))
with torch.no_grad():
    assert hub.plain(q, k, v, slopes)[0].grad_fn is None

# values that are columns of the keys
q, k = leaves((1, 2, 9, 24), (1, 1, 9, 24))
same(hub.part(q, k), attention(q, k, k[..., 8:]))
same(*(torch.autograd.grad(one[0].sum(), (q, k)) for one in (hub.part(q, k), attention(q, k, k[..., 8:]))))

q, k, v = leaves((12, 2, 16), (12, 2, 16), (12, 2, 16))
begins = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
found = hub.packed(q, k, v, begins, begins, max_q_len=7, max_kv_len=7)
parts = [[x[a:b].transpose(0, 1)[None] for x in (q, k, v)] for a, b in ((0, 5), (5, 12))]
expected = torch.cat([attention(*one)[0][0].transpose(0, 1) for one in parts])
same([found], [expected])
same(*(torch.autograd.grad(one.square().sum(), (q, k, v)) for one in (found, expected)))
print("right")
"""

WITHOUT_GRADIENTS = """
q = torch.randn(1, 2, 9, 16)
slopes = torch.randn(2).requires_grad_()
found = hub.plain(q, q, q, slopes)[0]
try:
    found.sum().backward()
except RuntimeError as error:
    print(error)
"""


def program(directory: Path, text: str) -> str:
    return f"HUB = {str(directory / 'hub' / '__init__.py')!r}\n{text}"


@needs_compiler
@pytest.mark.long(one_of=1)
def test_gradients_are_torchs(tmp_path: Path, driver: Path) -> None:
    pytest.importorskip("torch")
    plain, *others = load_text(SPECS)
    arches = (ARCHES["sm_80"],)
    of_all = packaged(plain, Request(arches, wanted=("q", "k", "v", "slopes", "scaling")))
    made = library("attngen", [of_all, *(packaged(one, Request(arches)) for one in others)], compile=emulated)
    assert extension_prints(made, program(tmp_path, WITH_TORCH), tmp_path, driver) == "right\n"


@needs_compiler
@pytest.mark.long(one_of=1)
@pytest.mark.parametrize("only", ["forward", None])
def test_a_gradient_that_the_library_lacks_is_an_error(only: str | None, tmp_path: Path, driver: Path) -> None:
    pytest.importorskip("torch")
    made = library_of(load_text(SPECS)[0], compile=emulated, only=only)
    start = (
        WITH_TORCH[: WITH_TORCH.index("# params")]
        .replace("hub.part(*2", "hub.plain(*4")
        .replace("hub.part(torch.zeros(24), ", "hub.plain(*3 * [torch.zeros(24)], ")
    )
    printed = extension_prints(made, program(tmp_path, start + WITHOUT_GRADIENTS), tmp_path, driver)
    assert printed == "this library has no gradient of `slopes`: see `attngen package --help`, --only and --wanted\n"

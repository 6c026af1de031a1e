"""The hopper schedule on the GPU: its results do not depend on the order of work tiles, bit by bit."""

from __future__ import annotations

import pytest

import attngen
from attngen.reference.problems import Shape, sample
from attngen.reference.torch_oracle import to_torch
from tests.device.test_key_vectors import described

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import attngen.torch  # noqa: E402  (its calls have a counter of rows for each stream)

RUNS = 100


def problem(head_dim: int, length: int) -> tuple[torch.Tensor, ...]:
    shape = (2, 2048 // head_dim, length, head_dim)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))


@pytest.mark.parametrize("length", [1000, 4096])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_the_same_inputs_give_the_same_bits(mask: str | None, head_dim: int, length: int) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask, lse=True)
    kernel = attngen.compile(spec, kernel="hopper", device="cuda")
    q, k, v = problem(head_dim, length)
    output, lse = kernel(q, k, v)
    for run in range(RUNS):
        again, again_lse = kernel(q, k, v)
        assert torch.equal(again, output), run
        assert torch.equal(again_lse, lse), run


@pytest.mark.parametrize("name", ["documents", "bias, causal", "documents and a bias"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_key_vectors_are_never_those_of_another_tile(name: str, head_dim: int) -> None:
    spec = described(name, head_dim=head_dim)
    kernel = attngen.compile(spec, kernel="hopper", device="cuda")
    given = sample(spec, Shape(2, 2048 // head_dim, 2048 // head_dim, 4000, 4000))
    q, k, v = (to_torch(t, "cuda") for t in (given.q, given.k, given.v))
    inputs = {n: to_torch(t, "cuda") for n, t in given.inputs.items()}
    first = kernel(q, k, v, **inputs)
    for run in range(RUNS):
        again = kernel(q, k, v, **inputs)
        assert torch.equal(again[0] if spec.lse else again, first[0] if spec.lse else first), run


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_the_same_bits_from_two_streams_at_once(mask: str | None, head_dim: int) -> None:
    spec = attngen.define(dtype="bf16", head_dim=head_dim, mask=mask)
    kernel = attngen.compile(spec, kernel="hopper", device="cuda")
    problems = [problem(head_dim, length) for length in (1000, 4096)]
    expected = [kernel(*p) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    different = [torch.zeros((), dtype=torch.bool, device="cuda") for _ in problems]
    torch.cuda.synchronize()
    for _ in range(RUNS):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                different[i] |= (kernel(*problems[i]) != expected[i]).any()  # nothing waits, so that both streams are full
    torch.cuda.synchronize()
    assert not any(bool(d) for d in different)

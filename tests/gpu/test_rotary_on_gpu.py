"""Rotary embeddings on the GPU: schedules forward and backward against float64, a captured training step, and decoding."""

from __future__ import annotations

import pytest

import attngen
from attngen.device.select import device_by_name
from attngen.inspect.gpu_memory import from_gpu, to_gpu
from attngen.plan import ARCHES
from attngen.reference.compare import compare, truth
from attngen.reference.free_sizes import with_free_sizes
from attngen.reference.problems import Shape, sample
from attngen.schedules import schedules_for
from attngen.spec.gradient import QKV
from tests.device.test_rotary import rotated
from tests.harness import wrong_gradients
from tests.torch.test_decode import STEPS, check

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attngen.torch import Attention  # noqa: E402

SHAPES = (Shape(2, 4, 2, 1, 130), Shape(1, 4, 2, 300, 300), Shape(2, 4, 1, 200, 513))
# The element type, head size, rotated elements and pairs; schedules of the forward and of the backward
CASES = (
    ("bf16", 128, 128, "halves", ("hopper", "decode", "fused"), ("hopper", "fused")),
    ("fp16", 64, 32, "interleaved", ("hopper", "naive"), ("hopper",)),
    ("fp32", 48, 48, "halves", ("fused", "tiled"), ("fused",)),
)


@pytest.mark.parametrize(("dtype", "head_dim", "dim", "pairs", "forwards", "backwards"), CASES)
def test_results_and_gradients(
    dtype: str, head_dim: int, dim: int, pairs: str, forwards: tuple[str, ...], backwards: tuple[str, ...]
) -> None:
    spec = rotated(dtype, dim, pairs, head_dim=head_dim, head_dim_v=head_dim)
    suitable = schedules_for(spec, ARCHES[device_by_name("cuda").arch])
    for schedule in set(forwards) & set(suitable):
        kernel = attngen.compile(spec, kernel=schedule, device="cuda")
        for seed, shape in enumerate(SHAPES):
            problem = sample(spec, with_free_sizes(spec, shape, {}), seed)
            given = {n: to_gpu(a) for n, a in {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}.items()}
            found = compare(from_gpu(kernel(**given)), None, truth(spec, problem))
            assert found.passed, (schedule, shape, found)
        if schedule in backwards:
            for seed, shape in enumerate(SHAPES):
                assert not wrong_gradients(kernel, with_free_sizes(spec, shape, {}), QKV, seed=seed), (schedule, shape)


def test_a_captured_training_step_repeats() -> None:
    """Gradients by autograd, as those of the same step in a CUDA graph."""
    layer = Attention(rotated("bf16", 128, head_dim=128, head_dim_v=128), deterministic=True)
    q, k, v = (torch.randn(2, h, 300, 128, device="cuda").bfloat16().requires_grad_() for h in (4, 2, 2))
    angles = torch.rand(300, 64, device="cuda") * 6
    cosines, sines, dout = angles.cos(), angles.sin(), torch.randn_like(q)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(layer(q, k, v, cosines=cosines, sines=sines), (q, k, v), dout)

    usual = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(captured, usual, strict=True))


@pytest.mark.parametrize("step", STEPS[:2])
def test_a_cache(step: object) -> None:
    check("rotary", step, "auto", device="cuda")  # type: ignore[arg-type]


def test_a_graph_decodes_with_other_lengths() -> None:
    tables = dict.fromkeys(("cosines", "sines"), ("fp32", ("positions", 32)))
    layer = Attention(mask="causal", rotary="64 halves by cosines, sines", inputs=tables, enable_gqa=True)
    q, new = (torch.randn(2, h, 1, 64, device="cuda").bfloat16() for h in (8, 2))
    keys, values = (torch.randn(2, 2, 3000, 64, device="cuda").bfloat16() for _ in range(2))
    angles = torch.rand(3000, 32, device="cuda") * 6
    used = torch.tensor([2999, 16], dtype=torch.int32, device="cuda")

    def decode() -> torch.Tensor:
        return layer.decode(q, keys, values, new, new, cache_seqlens=used, cosines=angles.cos(), sines=angles.sin())

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode()
    for lengths in ([1, 2000], [0, 2999]):
        used.copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, decode())

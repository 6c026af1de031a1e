"""Rotary embeddings on the GPU: every schedule forward and backward against float64, and a training step beside torch's."""

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

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attngen.torch import Attention  # noqa: E402

SHAPES = (Shape(2, 4, 2, 1, 130), Shape(1, 4, 2, 300, 300), Shape(2, 4, 1, 200, 513))
ROTATIONS = ((48, 32, "halves"), (64, 64, "interleaved"), (128, 128, "halves"), (256, 64, "interleaved"))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("head_dim", "dim", "pairs"), ROTATIONS)
def test_every_schedule(head_dim: int, dim: int, pairs: str, dtype: str) -> None:
    spec = rotated(dtype, dim, pairs, head_dim=head_dim, head_dim_v=head_dim)
    arch = ARCHES[device_by_name("cuda").arch]
    for schedule in schedules_for(spec, arch):
        kernel = attngen.compile(spec, kernel=schedule, device="cuda")
        for seed, shape in enumerate(SHAPES):
            shape = with_free_sizes(spec, shape, {})
            problem = sample(spec, shape, seed)
            given = {n: to_gpu(a) for n, a in {"q": problem.q, "k": problem.k, "v": problem.v, **problem.inputs}.items()}
            found = compare(from_gpu(kernel(**given)), None, truth(spec, problem))
            assert found.passed, (schedule, shape, found)
    for schedule in schedules_for(spec, arch, QKV):
        kernel = attngen.compile(spec, kernel=schedule, device="cuda")
        for seed, shape in enumerate(SHAPES):
            assert not wrong_gradients(kernel, with_free_sizes(spec, shape, {}), QKV, seed=seed), (schedule, shape)


def test_a_captured_training_step_repeats() -> None:
    """Gradients by autograd, as those of the same step in a CUDA graph."""
    layer = Attention(rotated("bf16", 64, head_dim=64, head_dim_v=64), deterministic=True)
    q, k, v = (torch.randn(2, h, 300, 64, device="cuda").bfloat16().requires_grad_() for h in (4, 2, 2))
    angles = torch.rand(300, 32, device="cuda") * 6
    dout = torch.randn_like(q)

    def step() -> tuple[torch.Tensor, ...]:
        o = layer(q, k, v, cosines=angles.cos(), sines=angles.sin())
        return torch.autograd.grad(o, (q, k, v), dout)

    usual = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(captured, usual, strict=True))

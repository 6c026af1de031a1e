"""The guarded memory itself: one element beyond the edge of a tensor stops the process, the elements of the tensor do not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.guarded_memory import EDGES

pytestmark = pytest.mark.gpu

READS = """
import sys
import torch
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
from tests.guarded_memory import GuardedMemory, leave

edge, size, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
GuardedMemory(edge).install()
numbers = torch.zeros(size, device="cuda")
result = torch.empty(1, device="cuda")
assert torch.isnan(result).all()
device = Device(0)
device.set_current()
text = 'extern "C" __global__ void read(const float* numbers, int i, float* result) { *result = numbers[i]; }'
options = ProgramOptions(arch=f"sm_{device.compute_capability[0]}{device.compute_capability[1]}")
kernel = Program(text, "c++", options).compile("cubin").get_kernel("read")
stream = device.create_stream()
launch(stream, LaunchConfig(grid=1, block=1), kernel, numbers.data_ptr(), index, result.data_ptr())
stream.sync()
assert result.item() == 0
print("read")
leave(0)
"""


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("size", [1, 3, 1024, 2**20 + 5])
def test_an_access_beyond_the_edge_stops_the_process(edge: str, size: int) -> None:
    outside, inside = (size, size - 1) if edge == "end" else (-1, 0)
    for index, is_read in ((inside, True), (outside, False)):
        command = [sys.executable, "-c", READS, edge, str(size), str(index)]
        found = subprocess.run(command, capture_output=True, text=True)
        assert (found.returncode == 0 and "read" in found.stdout) == is_read, (index, found)
        assert is_read or "ILLEGAL_ADDRESS" in found.stderr, found

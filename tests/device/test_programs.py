"""A hand-written backward program: binding and calls need only its tensors, roles and formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attngen import ArgumentError
from attngen.device.arrays import view
from attngen.device.binding import bind, sizes_of
from attngen.device.emulated import EmulatedDevice
from attngen.device.protocol import Kernel
from attngen.emit.manifest import from_manifest, to_manifest
from tests.device.programs import SCALE, backward_problem, backward_program, expected_gradients

DEVICE = EmulatedDevice()


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return DEVICE.compile(backward_program())


def run(kernel: Kernel, given: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {name: view(array, name) for name, array in given.items()}
    bound = bind(kernel, sizes_of(kernel.source, DEVICE, arrays), arrays, {"scale": SCALE})
    bound.run()
    return bound.outputs


def test_a_backward_runs_by_its_table_of_tensors(kernel: Kernel) -> None:
    given = backward_problem()
    expected = expected_gradients(given)
    found = run(kernel, given)
    assert list(found) == ["dq", "dk", "dv"]
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-5)
    assert set(kernel.counters.bytes_written) == {"dQ", "dK", "dV", "delta"}  # type: ignore[attr-defined]


def test_an_output_lies_in_memory_as_the_first_input_with_its_axes(kernel: Kernel) -> None:
    given = backward_problem()
    given["dout"] = np.ascontiguousarray(given["dout"].swapaxes(1, 2)).swapaxes(1, 2)
    found = run(kernel, given)
    assert found["dq"].swapaxes(1, 2).flags.c_contiguous
    assert found["dk"].flags.c_contiguous
    np.testing.assert_allclose(found["dq"], expected_gradients(given)["dq"], rtol=1e-4, atol=1e-5)


def test_an_output_of_the_caller_is_filled_and_checked(kernel: Kernel) -> None:
    given = backward_problem()
    dk = np.zeros((2, 3, 2 * 37, 8), np.float32)[:, :, ::2]
    assert run(kernel, {**given, "dk": dk})["dk"] is dk
    np.testing.assert_allclose(dk, expected_gradients(given)["dk"], rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="`dk` and `k` share memory"):
        run(kernel, {**given, "dk": given["k"]})
    with pytest.raises(ArgumentError, match=r"`dk` is \[2, 3, 36, 8\]: dimension 2 is 36, expected kv_len = 37 as in `k`"):
        run(kernel, {**given, "dk": np.zeros((2, 3, 36, 8), np.float32)})


def test_only_tensors_that_may_broadcast_do(kernel: Kernel) -> None:
    given = backward_problem()
    one = {**given, "slopes": given["slopes"][:1]}
    same = {**given, "slopes": np.repeat(given["slopes"][:1], 3)}
    assert all(np.array_equal(x, y) for x, y in zip(run(kernel, one).values(), run(kernel, same).values(), strict=True))
    with pytest.raises(ArgumentError, match="`lse` is"):
        run(kernel, {**given, "lse": given["lse"][:1]})


def test_alignment_and_strides_are_those_of_the_table(kernel: Kernel) -> None:
    given = backward_problem()
    wide = np.zeros((2, 3, 5, 16), np.float32)
    with pytest.raises(ArgumentError, match="`dout` has stride 2 in its last dimension"):
        run(kernel, {**given, "dout": wide[..., ::2]})


def test_its_manifest_holds_all_of_it() -> None:
    program = backward_program()
    assert from_manifest(to_manifest(program), program.text) == program

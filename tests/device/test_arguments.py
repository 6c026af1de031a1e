"""Errors of calls with wrong arrays: they name the argument, its value, and what was expected."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import attngen
from attngen import ArgumentError
from attngen.device.arrays import NUMPY_BFLOAT16, ArgumentTypeError, current_stream, empty_like, view
from attngen.spec.dtypes import DTYPES
from attngen.spec.obligations import ObligationError

RNG = np.random.default_rng(0)


def randn(*shape: int, dtype=np.float16) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.fixture(scope="module")
def kernel() -> attngen.CompiledAttention:
    spec = attngen.define(
        head_dim=16,
        heads=(4, 2),
        mask="causal and q - k < window",
        score="s + slopes[h]",
        inputs={"slopes": ("fp32", ("heads",))},
        params={"window": ("int", 9)},
        kernel="fused",
    )
    return attngen.compile(spec, device="emulated")


def arguments(**changed):
    given = {"q": randn(2, 4, 30, 16), "k": randn(2, 2, 30, 16), "v": randn(2, 2, 30, 16), "slopes": np.zeros(4, np.float32)}
    return {name: value for name, value in (given | changed).items() if value is not None}


def shifted(array: np.ndarray, by: int) -> np.ndarray:
    """A copy whose address is `by` bytes above a multiple of 16."""
    memory = np.zeros(array.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + by
    result = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def between_elements(array: np.ndarray) -> np.ndarray:
    """An array of that shape and type whose address is odd."""
    return np.frombuffer(bytearray(array.nbytes + 1), array.dtype, offset=1).reshape(array.shape)


WRONG = {
    "rank": ({"q": randn(4, 30, 16)}, ["`q` has 3 dimensions", "expected 4", "[batch, 4, q_len, 16]"]),
    "dtype": ({"k": randn(2, 2, 30, 16, dtype=np.float32)}, ["`k` has elements of fp32", "expected fp16"]),
    "unknown dtype": ({"k": np.zeros((2, 2, 30, 16), np.complex64)}, ["`k` has elements of complex64; expected fp16"]),
    "no array": ({"v": [1, 2, 3]}, ["`v` is a list", "expected an array"]),
    "batch": ({"k": randn(3, 2, 30, 16)}, ["`k` is [3, 2, 30, 16]", "dimension 0 is 3", "batch = 2 as in `q`"]),
    "kv_len": ({"v": randn(2, 2, 31, 16)}, ["`v`", "dimension 2 is 31", "kv_len = 30 as in `k`"]),
    "head size": ({"q": randn(2, 4, 30, 24)}, ["`q`", "dimension 3 is 24", "16"]),
    "heads": ({"q": randn(2, 8, 30, 16)}, ["`q`", "dimension 1 is 8", "4"]),
    "input shape": ({"slopes": np.zeros(3, np.float32)}, ["`slopes` is [3]", "4"]),
    "missing input": ({"slopes": None}, ["input `slopes` was not given", "slopes="]),
    "unknown input": ({"slops": np.zeros(4, np.float32)}, ["no input or param `slops`", "did you mean `slopes`?"]),
    "param type": ({"window": 2.5}, ["param `window` is 2.5", "an int"]),
    "param truth value": ({"window": True}, ["param `window` is True"]),
    "param of more than fp32": ({"window": 10**400}, ["param `window` is a number of more than 40 digits"]),
    "masked array": ({"q": np.ma.masked_array(randn(2, 4, 30, 16))}, ["`q` is a masked array", "q.filled"]),
    "stream": ({"stream": "main"}, ["`stream` is 'main'", "handle"]),
    "param range": ({"window": 2**31}, ["at most 1073741824"]),
    "out shape": ({"out": randn(2, 4, 30, 24)}, ["`out`", "dimension 3 is 24"]),
    "out dtype": ({"out": randn(2, 4, 30, 16, dtype=np.float32)}, ["`out` has elements of fp32"]),
    "lse not asked": ({"lse": np.zeros((2, 4, 30), np.float32)}, ["`lse` was given", "output lse"]),
    "last stride": ({"q": randn(2, 4, 30, 32)[..., ::2]}, ["`q` has stride 2 in its last dimension", "contiguous copy"]),
    "row alignment": ({"q": randn(2, 4, 30, 17)[..., :16]}, ["`q` has stride 510 in dimension 1", "multiple of 16 bytes"]),
    "address": ({"q": shifted(randn(2, 4, 30, 16), 2)}, ["`q` starts at an address", "16 bytes"]),
    "expanded out": ({"out": np.broadcast_to(randn(1, 1, 1, 16), (2, 4, 30, 16))}, ["`out`"]),
    "part of an element": (
        {"slopes": np.ndarray((4,), np.float32, np.zeros(40, np.uint8), strides=(6,))},
        ["`slopes` has strides", "whole elements"],
    ),
    "between elements": ({"slopes": between_elements(np.zeros(4, np.float32))}, ["`slopes` starts at an address", "4 bytes"]),
    "byte order": ({"k": randn(2, 2, 30, 16, dtype=">f2")}, ["`k` has elements of >f2", "byte order", "k.astype("]),
    "byte order of an input": ({"slopes": np.zeros(4, ">f4")}, ["`slopes` has elements of >f4", "byte order"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(kernel, case: str) -> None:
    changed, expected = WRONG[case]
    given = arguments(**changed)
    with pytest.raises(ArgumentError) as caught:
        kernel(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    for text in expected:
        assert text in str(caught.value)


def test_attention_names_the_types_that_q_and_a_mask_may_have() -> None:
    q = randn(1, 1, 4, 8)
    for arguments, said in (
        ([q.astype(np.float64)] * 3, "`q` has elements of float64; expected one of fp16, bf16, fp32$"),
        ([q, q, q, np.zeros((4, 4))], "`attn_mask` has elements of float64; expected one of bool, fp16, bf16, fp32$"),
    ):
        with pytest.raises(ArgumentTypeError, match=said):
            attngen.attention(*arguments)


def test_types_are_type_errors_too(kernel) -> None:
    given = arguments(k=randn(2, 2, 30, 16, dtype=np.float32))
    with pytest.raises(TypeError):
        kernel(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert issubclass(ArgumentTypeError, ArgumentError)


def test_a_read_only_output_is_refused(kernel) -> None:
    out = randn(2, 4, 30, 16)
    out.flags.writeable = False
    given = arguments(out=out)
    with pytest.raises(ArgumentError, match="`out` is read-only"):
        kernel(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize("schedule", ["naive", "tiled", "fused"])
def test_any_strides_that_a_schedule_takes_give_the_same_result(schedule: str) -> None:
    kernel = attngen.compile(attngen.define(head_dim=16, mask="causal"), kernel=schedule, device="emulated")
    packed = randn(2, 20, 3, 4, 16)
    q, k, v = (packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    k = np.broadcast_to(k[:, :1], (2, 4, 20, 16))
    expected = kernel(*(np.ascontiguousarray(x) for x in (q, k, v)))
    out = np.zeros((2, 20, 4, 16), np.float16).transpose(0, 2, 1, 3)
    kernel(q, k, v, out=out)
    assert np.array_equal(out, expected)
    if schedule != "fused":
        reversed_keys = kernel(q, k[:, :, ::-1], v[:, :, ::-1])
        assert np.array_equal(
            reversed_keys[:, :, -1], kernel(q, np.ascontiguousarray(k[:, :, ::-1]), v[:, :, ::-1].copy())[:, :, -1]
        )


@pytest.mark.parametrize(("q_len", "kv_len", "batch"), [(0, 5, 1), (5, 0, 1), (5, 5, 0)])
@pytest.mark.parametrize("schedule", ["naive", "tiled", "fused"])
def test_nothing_in_gives_nothing_or_zero(schedule: str, q_len: int, kv_len: int, batch: int) -> None:
    kernel = attngen.compile(attngen.define(head_dim=16, lse=True), kernel=schedule, device="emulated")
    output, lse = kernel(randn(batch, 2, q_len, 16), randn(batch, 1, kv_len, 16), randn(batch, 1, kv_len, 16))
    assert output.shape == (batch, 2, q_len, 16)
    assert not output.any()
    assert (lse == -np.inf).all()


def test_an_index_beyond_a_captured_tensor_is_refused_before_anything_runs() -> None:
    spec = attngen.define(head_dim=16, score="s + bias[q]", inputs={"bias": ("fp32", ("own",))})
    kernel = attngen.compile(spec, device="emulated")
    q = randn(1, 1, 30, 16)
    kernel(q, q, q, bias=np.zeros(30, np.float32))
    with pytest.raises(ObligationError, match=r"index 0 of `bias` can be 0 to 29.*20 elements"):
        kernel(q, q, q, bias=np.zeros(20, np.float32))
    with pytest.raises(ObligationError, match=r"has 0 elements; give a larger tensor$"):
        kernel(q, q, q, bias=np.zeros(0, np.float32))


def test_a_tensor_of_one_head_that_all_heads_read_is_to_be_declared_so() -> None:
    """Its index is 0, or its dimension is named, so that size 1 is broadcast: a clamp of `h` to 0 says neither."""
    masks = {"ones": (1, "m[b, h, q, k]"), "own": ("n", "m[b, h, q, k]"), "last": (1, "m[b, h + 1 - q_heads, q, k]")}
    for name, (dim, mask) in masks.items():
        spec = attngen.define(head_dim=16, mask=mask, inputs={"m": ("bool", ("batch", dim, "q_len", "kv_len"))})
        q = randn(1, 2, 8, 16)
        with pytest.raises(ObligationError, match=r"the dimension( \(n\))? has 1 element;") as caught:
            attngen.compile(spec, device="emulated")(q, q, q, m=np.ones((1, 1, 8, 8), bool))
        assert "clamp" not in str(caught.value)
        declare = "write 0 as index 1, or declare the dimension as heads: a tensor of size 1 is broadcast over it"
        assert (declare in str(caught.value)) == (name != "last")


def test_a_param_that_may_divide_by_zero_is_refused() -> None:
    mask = "(q - k) % n == 0 or q // n == k // m or kv_len // m == 1"
    kernel = attngen.compile(attngen.define(head_dim=16, mask=mask, params={"n": "int", "m": "int"}), device="emulated")
    q = randn(1, 1, 8, 16)
    kernel(q, q, q, n=2, m=-3)
    for n, m, symbol in ((0, 1, "%"), (2, 0, "//")):
        with pytest.raises(ObligationError, match=f"the divisor of `{symbol}` is 0"):
            kernel(q, q, q, n=n, m=m)
    with pytest.raises(ArgumentError, match="has no default and was not given"):
        kernel(q, q, q)


def test_none_for_a_param_with_a_default_is_no_number(kernel: attngen.CompiledAttention) -> None:
    given = {**arguments(), "window": None}
    with pytest.raises(ArgumentTypeError, match=r"^param `window` is None; expected an int$"):
        kernel(**given)


def test_numbers_of_attention_as_arrays_without_dimensions() -> None:
    q = randn(1, 1, 4, 16)
    with pytest.raises(ArgumentTypeError, match=r"^`scale` is a ndarray; expected a number\. Multiply the query by it"):
        attngen.attention(q, q, q, scale=np.array(0.1))
    dropped = [attngen.attention(q, q, q, dropout_p=p, seed=1, mode="naive") for p in (0.5, np.array(0.5))]
    np.testing.assert_array_equal(*dropped)


def test_beginnings_of_no_sequence_and_of_another_type_are_refused() -> None:
    kernel = attngen.compile(attngen.define(head_dim=16), kernel="naive", device="emulated", storage="packed")
    rows = randn(5, 2, 16)
    for begins, said in (
        (np.zeros(0, np.int32), r"^`cu_seqlens_q` is \[0\]; expected at least one number"),
        (np.array([0, 5]), "^`cu_seqlens_q` has elements of int64; expected int32. Convert it$"),
    ):
        with pytest.raises(ArgumentError, match=said):
            kernel(rows, rows, rows, cu_seqlens_q=begins, cu_seqlens_k=begins, max_q_len=5, max_kv_len=5)


def test_the_stride_of_a_dimension_of_size_1_is_any_number() -> None:
    """A dimension of size 1 may have any stride, as in a slice of a large tensor: the stride is not used."""
    spec = attngen.define(head_dim=16, score="s + bias[q, k]", inputs={"bias": ("fp32", ("q_len", "kv_len"))})
    kernel = attngen.compile(spec, kernel="naive", device="emulated:fast")
    k, bias = randn(1, 1, 8, 16), randn(1, 8, dtype=np.float32)
    far = np.lib.stride_tricks.as_strided(bias, strides=(2**40, 4))
    assert np.array_equal(kernel(k[:, :, :1], k, k, bias=far), kernel(k[:, :, :1], k, k, bias=bias))


def test_params_may_be_numbers_of_numpy_and_must_fit() -> None:
    spec = attngen.define(
        head_dim=16, mask="q - k < n", score="s * c", params={"n": np.int64(3), "c": ("float", np.float32(0.5))}
    )
    kernel = attngen.compile(spec, kernel="naive", device="emulated:fast")
    q = randn(1, 1, 8, 16)
    assert np.array_equal(kernel(q, q, q), kernel(q, q, q, n=np.int32(3), c=np.float64(0.5)))
    for c in (1e300, 10**400):
        with pytest.raises(ArgumentError, match=r"param `c` is .*; expected at most 3.4"):
            kernel(q, q, q, c=c)
    for n in (np.float32(3), np.bool_(True)):
        with pytest.raises(ArgumentTypeError, match="expected an int"):
            kernel(q, q, q, n=n)


@pytest.mark.parametrize(
    ("keyword", "given", "said"),
    [
        ("device", 5, "`device` is 5; expected the name of a device"),
        ("device", "emulatd", "no device is called 'emulatd'"),
        ("arch", 80, "`arch` is 80"),
        ("captures", [1], "expected a mapping from names to arrays"),
        ("ahead", "sm_80", "`ahead` is 'sm_80'; expected a list"),
    ],
)
def test_arguments_of_compile_that_are_nothing_of_their_kind(keyword: str, given: object, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        attngen.compile(attngen.define(head_dim=16), **{keyword: given})
    with pytest.raises(ArgumentTypeError, match="`spec` is 5; expected an AttentionSpec"):
        attngen.compile(5)


class DLPackOnly:
    """An array whose only protocol is DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_an_output_through_dlpack_is_returned_as_it_was_given() -> None:
    kernel = attngen.compile(attngen.define(head_dim=16), kernel="naive", device="emulated:fast")
    q = randn(1, 2, 5, 16)
    out = DLPackOnly(np.zeros_like(q))
    assert kernel(q, q, q, out=out) is out
    assert np.array_equal(out.array, kernel(q, q, q))


def test_an_output_lies_in_memory_as_the_queries_do() -> None:
    kernel = attngen.compile(attngen.define(head_dim=16, lse=True), kernel="naive", device="emulated:fast")
    q = randn(1, 5, 2, 16).transpose(0, 2, 1, 3)
    output, lse = kernel(q, q, q)
    assert output.transpose(0, 2, 1, 3).flags.c_contiguous
    assert lse.flags.c_contiguous
    contiguous, _ = kernel(*(np.ascontiguousarray(q) for _ in range(3)))
    assert contiguous.flags.c_contiguous
    assert np.array_equal(output, contiguous)
    with pytest.raises(ArgumentTypeError, match=r"^`lse` has elements of fp16; expected fp32\. Convert it$"):
        kernel(q, q, q, lse=lse.astype(np.float16))


def test_dlpack_is_read_in_place() -> None:
    array = randn(3, 4, 5).transpose(1, 0, 2)
    seen = view(DLPackOnly(array), "x")
    assert (seen.pointer, seen.shape, seen.strides, seen.dtype.name) == (array.ctypes.data, (4, 3, 5), (5, 20, 1), "fp16")


def test_torch_tensors_are_read_in_place() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.randn(2, 3, 4, dtype=torch.bfloat16).transpose(0, 1)
    seen = view(tensor, "x")
    assert (seen.pointer, seen.shape, seen.strides, seen.dtype.name) == (tensor.data_ptr(), (3, 2, 4), (4, 12, 1), "bf16")
    kernel = attngen.compile(attngen.define(dtype="bf16", head_dim=16), device="emulated")
    q = torch.randn(1, 2, 9, 16, dtype=torch.bfloat16)
    result = kernel(q, q, q)
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.bfloat16
    with pytest.raises(ArgumentError, match="requires grad"):
        kernel(q.clone().requires_grad_(), q, q, out=torch.empty_like(q))


def test_torch_tensors_whose_memory_is_not_their_elements_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentTypeError, match="`x` is a sparse_coo tensor"):
        view(torch.eye(3).to_sparse(), "x")
    with pytest.raises(ArgumentTypeError, match="`x` is a nested tensor"):
        view(torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged), "x")
    negated = torch.randn(2, 3, dtype=torch.complex64).conj().imag
    with pytest.raises(ArgumentError, match=r"`x` is a negated view.*x.resolve_neg"):
        view(negated, "x")
    assert view(negated.resolve_neg(), "x").shape == (2, 3)


class OnGpu:
    """An array of a library that has the CUDA array interface."""

    def __init__(self, array: np.ndarray, **more: object) -> None:
        interface = array.__array_interface__
        self.keep = array
        self.__cuda_array_interface__ = {key: interface[key] for key in ("shape", "typestr", "data", "strides")} | {
            "version": 3,
            **more,
        }


def test_the_cuda_array_interface_is_read_completely() -> None:
    array = randn(2, 3)
    assert current_stream(view(OnGpu(array, stream=5), "x")) == 5
    assert current_stream(view(OnGpu(array), "x")) is None
    with pytest.raises(ArgumentTypeError, match="`x` is a masked array"):
        view(OnGpu(array, mask=OnGpu(array > 0)), "x")

    class InBf16(OnGpu, DLPackOnly):  # as CuPy and JAX have it: the interface has no name for the type, and DLPack has one
        pass

    torch = pytest.importorskip("torch")
    both = InBf16(array, typestr="<V2")
    both.array = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert view(both, "x").dtype.name == "bf16"


def test_outputs_of_numbas_arrays_are_numbas(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in of its module; tests/gpu/test_torch_on_gpu.py has its own arrays."""

    class DeviceNDArray(OnGpu):
        pass

    DeviceNDArray.__module__ = "numba.cuda.cudadrv.devicearray"
    made = SimpleNamespace(gpus=[nullcontext()], device_array=lambda shape, dtype: DeviceNDArray(np.zeros(shape, dtype)))
    q, fp16 = view(DeviceNDArray(randn(1, 2, 3, 16)), "q"), DTYPES["fp16"]
    with pytest.raises(ArgumentError, match="cannot allocate memory for a DeviceNDArray"):
        empty_like(q, (1, 2, 3, 8), fp16, "out")
    monkeypatch.setitem(sys.modules, "numba.cuda", made)
    for heads_inside in (False, True):
        out = empty_like(q, (1, 2, 3, 8), fp16, "out", heads_inside)
        assert type(out.owner) is DeviceNDArray
        assert (out.shape, out.dtype, out.location.kind) == ((1, 2, 3, 8), fp16, "cuda")
    with pytest.raises(ArgumentError, match="numba has no bf16"):
        empty_like(q, (1, 2, 3, 8), DTYPES["bf16"], "out")


def test_arrays_in_different_places_are_refused(kernel) -> None:
    given = arguments(k=OnGpu(randn(2, 2, 30, 16)))
    with pytest.raises(ArgumentError, match=r"`q` is on cpu and `k` on cuda:0"):
        kernel(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    on_gpu = {name: OnGpu(array) for name, array in arguments().items()}
    with pytest.raises(ArgumentError, match=r"compiled for the emulated device"):
        kernel(on_gpu.pop("q"), on_gpu.pop("k"), on_gpu.pop("v"), **on_gpu)


def test_pointers_are_64_bit() -> None:
    """Strides reach the kernel as long long: two rows 3 GB apart, backed by one page each."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    size = 3 * 2**32
    address = libc.mmap(None, size, 3, 0x4022, -1, 0)  # private, anonymous, no reserve
    if address in (None, ctypes.c_void_p(-1).value):
        pytest.skip("this machine lends no 12 GB of addresses")
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)).view(np.float16)
    k = np.lib.stride_tricks.as_strided(memory, (1, 1, 2, 16), (0, 0, size // 2, 2))
    k[...] = randn(1, 1, 2, 16)
    q = randn(1, 1, 3, 16)
    for schedule in ("naive", "tiled", "fused"):
        kernel = attngen.compile(attngen.define(head_dim=16), kernel=schedule, device="emulated")
        assert np.array_equal(kernel(q, k, k), kernel(q, k.copy(), k.copy()))


class Jax:
    """An array of a library that has bf16 of ml_dtypes, and DLPack."""

    def __init__(self, tensor) -> None:
        self.tensor, self.dtype = tensor, np.dtype(pytest.importorskip("ml_dtypes").bfloat16)

    def __dlpack__(self, **_):
        return self.tensor.__dlpack__()


def test_results_have_the_type_of_bf16_that_came_in() -> None:
    """That of ml_dtypes, whose numbers numpy converts, or attngen's own structured one, whose bits it would convert."""
    ml_dtypes, torch = pytest.importorskip("ml_dtypes"), pytest.importorskip("torch")
    spec = attngen.define(
        dtype="bf16", head_dim=8, score="s + f[q]", inputs={"f": ("bf16", ("q_len",))}, kernel="naive", lse=True
    )
    kernel = attngen.compile(spec, device="emulated")
    q, f = (randn(*shape, dtype=np.float32).astype(ml_dtypes.bfloat16) for shape in ((1, 1, 5, 8), (5,)))
    out, lse = kernel(q, q, q, f=f)
    assert (out.dtype, lse.dtype) == (ml_dtypes.bfloat16, np.float32)
    assert np.abs(out.astype(np.float32)).max() < 10
    found = kernel.backward(q, q, q, q, f=f, wanted=("q", "k", "v", "f"))
    assert {array.dtype for array in found.values()} == {np.dtype(ml_dtypes.bfloat16)}
    own = [array.view(NUMPY_BFLOAT16) for array in (q, f)]
    plain, _ = kernel(own[0], own[0], own[0], f=own[1])
    assert plain.dtype == NUMPY_BFLOAT16
    np.testing.assert_array_equal(plain.view(np.uint16), out.view(np.uint16))
    jax = Jax(torch.from_numpy(q.view(np.int16)).view(torch.bfloat16))
    assert kernel(jax, jax, jax, f=f)[0].dtype == ml_dtypes.bfloat16

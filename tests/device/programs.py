"""A hand-written backward program: several kernels, a workspace, three outputs, more inputs than a forward has."""

from __future__ import annotations

from typing import Any

import numpy as np

from attngen.emit.program import Axis, CeilDiv, KernelEntry, Parameter, Product, Program, Tensor, free

HEAD_DIM, THREADS = 8, 32
QUERIES = (free("batch"), free("heads"), free("q_len"), Axis("head_dim", HEAD_DIM))
KEYS = (free("batch"), free("heads"), free("kv_len"), Axis("head_dim", HEAD_DIM))

TENSORS = (
    Tensor("dO", "input", "fp32", QUERIES, "dout", alignment=16, unit_stride=True),
    Tensor("Q", "input", "fp32", QUERIES, "q"),
    Tensor("K", "input", "fp32", KEYS, "k"),
    Tensor("V", "input", "fp32", KEYS, "v"),
    Tensor("O", "input", "fp32", QUERIES, "out"),
    Tensor("lse", "input", "fp32", QUERIES[:3], "lse"),
    Tensor("slopes", "input", "fp32", (free("heads"),), "slopes", broadcasts=True),
    Tensor("dQ", "output", "fp32", QUERIES, "dq"),
    Tensor("dK", "output", "fp32", KEYS, "dk"),
    Tensor("dV", "output", "fp32", KEYS, "dv"),
    Tensor("delta", "workspace", "fp32", QUERIES[:3]),
)

TEXT = """
constexpr int D = 8;
struct Tensor { float* data; long long b, h, s; };
static __device__ float* row(const Tensor& t, int b, int h, int i) { return t.data + b * t.b + h * t.h + i * t.s; }
static __device__ float dot(const float* x, const float* y) {
    float sum = 0.0f;
    for (int d = 0; d < D; ++d) sum += x[d] * y[d];
    return sum;
}

// delta = rowsum(dO * O)
extern "C" __global__ void prepare(float* delta, DO_PARAMETERS, O_PARAMETERS, int heads, int q_len) {
    const int i = blockIdx.x % ((q_len + 31) / 32) * 32 + threadIdx.x, bh = blockIdx.x / ((q_len + 31) / 32);
    const int b = bh / heads, h = bh % heads;
    if (i < q_len) delta[(long long)bh * q_len + i] = dot(row(DO_TENSOR, b, h, i), row(O_TENSOR, b, h, i));
}

// dQ: one thread for each row of queries; dK and dV: one for each row of keys
extern "C" __global__ void gradients(const float* delta, const float* lse, const float* slopes, int slopes_step, DO_PARAMETERS,
                                     Q_PARAMETERS, K_PARAMETERS, V_PARAMETERS, DQ_PARAMETERS, DK_PARAMETERS, DV_PARAMETERS,
                                     int heads, int q_len, int kv_len, float scale) {
    const int i = threadIdx.x, b = blockIdx.x / heads, h = blockIdx.x % heads;
    const float slope = *(const float*)((const char*)slopes + (long long)h * slopes_step);
    const long long rows = (long long)blockIdx.x * q_len;
    for (int j = i; j < q_len + kv_len; j += 32) {
        const bool is_query = j < q_len;
        const int own = is_query ? j : j - q_len;
        float first[D] = {}, second[D] = {};
        for (int other = 0; other < (is_query ? kv_len : q_len); ++other) {
            const int q = is_query ? own : other, k = is_query ? other : own;
            const float* q_row = row(Q_TENSOR, b, h, q);
            const float* k_row = row(K_TENSOR, b, h, k);
            const float* do_row = row(DO_TENSOR, b, h, q);
            const float p = expf(scale * dot(q_row, k_row) + slope * (k - q) - lse[rows + q]);
            const float ds = p * (dot(do_row, row(V_TENSOR, b, h, k)) - delta[rows + q]) * scale;
            for (int d = 0; d < D; ++d) first[d] += ds * (is_query ? k_row[d] : q_row[d]), second[d] += p * do_row[d];
        }
        for (int d = 0; d < D; ++d) {
            if (is_query) row(DQ_TENSOR, b, h, own)[d] = first[d];
            else row(DK_TENSOR, b, h, own)[d] = first[d], row(DV_TENSOR, b, h, own)[d] = second[d];
        }
    }
}
"""


def strided(tensor: str) -> list[Parameter]:
    return [
        Parameter(tensor, "float*", "data", tensor),
        *(Parameter(f"{tensor}_{a}", "long long", "stride", tensor, i) for i, a in enumerate("bhs")),
    ]


def sizes(*names: str) -> list[Parameter]:
    return [Parameter(name, "int", "size", name) for name in names]


def text() -> str:
    written = TEXT
    for tensor in ("dO", "O", "Q", "K", "V", "dQ", "dK", "dV"):
        parameters = ", ".join(f"{p.ctype} {p.name}" for p in strided(tensor))
        written = written.replace(f" {tensor.upper()}_PARAMETERS", f" {parameters}")
        written = written.replace(f"({tensor.upper()}_TENSOR", f"(Tensor{{{tensor}, {tensor}_b, {tensor}_h, {tensor}_s}}")
    return written


def backward_program() -> Program:
    prepare = KernelEntry(
        "prepare",
        (Parameter("delta", "float*", "data", "delta"), *strided("dO"), *strided("O"), *sizes("heads", "q_len")),
        (Product((CeilDiv("q_len", THREADS), "heads", "batch")), Product(()), Product(())),
        (THREADS, 1, 1),
    )
    gradients = KernelEntry(
        "gradients",
        (
            *(Parameter(name, "const float*", "data", name) for name in ("delta", "lse", "slopes")),
            Parameter("slopes_step", "int", "step", "slopes"),
            *(p for name in ("dO", "Q", "K", "V", "dQ", "dK", "dV") for p in strided(name)),
            *sizes("heads", "q_len", "kv_len"),
            Parameter("scale", "float", "param", "scale"),
        ),
        (Product(("heads", "batch")), Product(()), Product(())),
        (THREADS, 1, 1),
    )
    return Program("alibi_backward", text(), "sm_80", (prepare, gradients), TENSORS)


SCALE = 0.5


def backward_problem(batch: int = 2, heads: int = 3, q_len: int = 5, kv_len: int = 37) -> dict[str, np.ndarray[Any, Any]]:
    """The inputs by the names of their arguments, with the forward's own O and lse."""
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((batch, heads, q_len, HEAD_DIM)) for _ in range(2))
    k, v = (rng.standard_normal((batch, heads, kv_len, HEAD_DIM)) for _ in range(2))
    slopes = rng.standard_normal(heads) / 8
    scores = _scores(q, k, slopes)
    lse = np.log(np.exp(scores).sum(-1))
    out = np.exp(scores - lse[..., None]) @ v
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "slopes": slopes}
    return {name: array.astype(np.float32) for name, array in given.items()}


def _scores(q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], slopes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    distance = np.arange(k.shape[2])[None, :] - np.arange(q.shape[2])[:, None]
    return np.asarray(SCALE * q @ k.swapaxes(2, 3) + slopes[:, None, None] * distance)


def expected_gradients(given: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """The equations of the gradients, in float64."""
    dout, q, k, v, out, lse, slopes = (given[n].astype(np.float64) for n in ("dout", "q", "k", "v", "out", "lse", "slopes"))
    p = np.exp(_scores(q, k, slopes) - lse[..., None])
    ds = p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(-1, keepdims=True)) * SCALE
    return {"dq": ds @ k, "dk": ds.swapaxes(2, 3) @ q, "dv": p.swapaxes(2, 3) @ dout}

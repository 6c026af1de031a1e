"""docs/limits.md: each limit that it states is refused, with the message that it quotes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.conftest import ROOT

torch = pytest.importorskip("torch")

import attngen  # noqa: E402
from attngen.torch import Attention, attention  # noqa: E402

PAGE = (ROOT / "docs" / "limits.md").read_text()
Q = torch.zeros(1, 2, 16, 64, dtype=torch.float16)


def call(**changed: object) -> object:
    tensors = {"q": Q, "k": Q, "v": Q, **changed}
    return attention(tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), **tensors)


def plain(**said: object) -> object:
    return attngen.define(**{"dtype": "fp16", "head_dim": 64, **said})


def compiled(arch: str, kernel: str = "auto", dtype: str = "fp16") -> object:
    return attngen.compile(plain(dtype=dtype), kernel=kernel, arch=arch, device="emulated")


def branches(b: object, h: object, q: object, k: object) -> bool:
    return bool(q == k)


def second_derivative() -> object:
    q = Q[:, :, :1].clone().requires_grad_()
    (first,) = torch.autograd.grad(call(q=q).sum(), q, create_graph=True)
    return torch.autograd.grad(first.sum(), q)


def sequences_apart(kernel: str) -> object:
    k = torch.zeros(2, 1032, dtype=torch.float16)[:, :1024].view(2, 1, 16, 64)
    decode = attngen.compile(plain(), arch="sm_90a", device="emulated:fast", storage="padded", kernel=kernel)
    return decode(torch.zeros(2, 1, 1, 64, dtype=torch.float16), k, k, seqused=torch.tensor([16, 3], dtype=torch.int32))


DOUBLES = torch.zeros(3).double()
TABLE, IDS = torch.zeros(3), torch.zeros(16, dtype=torch.int32)
REFUSED: dict[str, Callable[[], object]] = {
    "limit has no gradient: only the mask reads it": lambda: Attention(
        mask="float(q - k) < limit", inputs={"limit": ("fp32", ())}
    )(Q, Q, Q, limit=torch.tensor(0.5, requires_grad=True)),
    "no kernel computes the second derivative of attention": second_derivative,
    "q has a tangent, and no kernel has a forward-mode derivative": lambda: torch.func.jvp(lambda q: call(q=q), (Q,), (Q,)),
    "weights times scales of V that differ from key to key exceed the range of fp16": lambda: attngen.compile(
        attngen.define(
            dtype={"q": "fp16", "k": "fp8_e4m3", "v": "fp8_e4m3"},
            v_scale="c[k]",
            inputs={"c": ("fp32", ("kv_len",))},
        ),
        kernel="fused",
        device="emulated",
    ),
    "q has elements of float64; expected one of fp16, bf16, fp32": lambda: call(q=Q.double()),
    "q has 5 dimensions; expected 2 to 4": lambda: call(q=Q[None]),
    "x has elements of float64; expected one of fp32": lambda: plain(score=lambda s, b, h, q, k, x=DOUBLES: s + x[h]),
    "has elements of fp32; expected fp16": lambda: call(k=Q.float()),
    "sum is not in this language": lambda: plain(score="sum(s)"),
    "rand is not in this language": lambda: plain(score="rand()"),
    "its heads have at most 256 elements": lambda: attngen.compile(
        attngen.define(head_dim=264), kernel="wgmma", device="emulated"
    ),
    "no schedule has such heads": lambda: attngen.compile(attngen.define(head_dim=584), device="emulated"),
    "head size 13 is not a multiple of 8": lambda: plain(head_dim=13),
    "param n is 2147483648; expected at most 1073741824 in magnitude": lambda: Attention(
        mask="q - k < n", params={"n": ("int", 1)}
    )(Q, Q, Q, n=2**31),
    "index 0 of tb comes from data": lambda: plain(
        inputs={"tb": ("fp32", (3,)), "at": ("int32", ("kv_len",))}, score="s + tb[at[k]]"
    ),
    "a traced value is neither true nor false yet": lambda: plain(mask=branches),
    "q has stride 40 in its last dimension": lambda: call(
        q=torch.zeros(1, 2, 64, 40).half().transpose(2, 3), k=Q[:, :, :1], v=Q[:, :, :1]
    ),
    "k has a stride of 1032 elements in its first dimension and 64 between rows": lambda: sequences_apart("decode"),
    "bool is not a type of a param": lambda: plain(params={"n": ("bool", True)}),
    "sink requires normalize softmax": lambda: plain(normalize="sigmoid", sink="1.0"),
    "no architecture is called sm_70; attngen list names them": lambda: compiled("sm_70"),
    "kernel wgmma of fp32": lambda: compiled("sm_90a", "wgmma", "fp32"),
    "kernel hopper on sm_80": lambda: compiled("sm_80", "hopper"),
    "tile 128 x 128 does not fit": lambda: attngen.compile(
        attngen.load("docs/tour/exercises/10_tiles.attn"), arch="sm_80", device="emulated"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_it_is_refused_in_these_words(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert words in re.sub(r"\s+", " ", PAGE)
    with pytest.raises((ValueError, TypeError)) as caught:
        REFUSED[words]()
    assert words in str(caught.value).replace("`", "")


def test_the_architectures_are_all_there_are() -> None:
    from attngen.plan import ARCHES

    row = next(line for line in PAGE.splitlines() if line.startswith("| Architectures "))
    assert re.findall(r"sm_\w+", row.split("|")[1]) == list(ARCHES)

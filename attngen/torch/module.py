"""`Attention`: a layer whose attention is any that the language can say."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

from attngen.api import load
from attngen.device.arrays import ArgumentError
from attngen.device.binding import check_params, refuse_unknown
from attngen.spec.attention import AttentionSpec, Rung
from attngen.spec.expr import Type
from attngen.torch.description import Description, Written, check_mode, fixed_text, head_size, register, spec_text
from attngen.torch.functional import attention
from attngen.torch.layout import check_layout, heads_first
from attngen.torch.operator import attention_operator

Tensor = Any


class Attention(torch.nn.Module):  # type: ignore[misc]
    """An attention as a layer, without parameters of its own.

    `Attention(spec)` runs an AttentionSpec or the one of an `.attn` file. `Attention(mask=..., score=..., ...)` describes
    one by the keywords of `attngen.define`, as text of the language or as functions; element type and head sizes come with
    the tensors. Arrays that functions capture become buffers. Without mask, score, sink and inputs it is torch's attention,
    and `forward` also takes a dense mask.

    forward(q, k, v, attn_mask=None, **named) takes captured inputs and params by name; see `attngen.torch.attention` for the
    rest.
    """

    def __init__(
        self,
        spec: AttentionSpec | str | PathLike[str] | None = None,
        *,
        mask: Written = None,
        score: Written = None,
        sink: Written = None,
        inputs: Mapping[str, tuple[str, tuple[int | str, ...]]] | None = None,
        params: Mapping[str, Any] | None = None,
        normalize: str = "softmax",
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        mode: Rung = "auto",
        return_lse: bool = False,
        layout: str = "bhsd",
        copy: bool = False,
    ) -> None:
        super().__init__()
        check_mode(mode)
        check_layout(layout)
        self.enable_gqa, self.layout, self.copy = enable_gqa, layout, copy
        self.is_causal, self.scale, self.mode, self.return_lse = is_causal, scale, mode, return_lse
        described = {"mask": mask, "score": score, "sink": sink, "inputs": inputs, "params": params}
        given = {name: value for name, value in described.items() if value is not None}
        if normalize != "softmax":
            given["normalize"] = normalize
        self._text: str | None = None
        self._number: int | None = None
        self._captured: tuple[str, ...] = ()
        if spec is not None:
            if given or is_causal or scale is not None:
                raise ArgumentError("the spec says mask, score and scale itself; give either it or the keywords")
            self._take_spec(_one(spec))
        elif given:
            self._describe(given, is_causal, scale)

    def _take_spec(self, spec: AttentionSpec) -> None:
        self._text = fixed_text(spec, self.mode)
        self.return_lse = spec.lse
        self.enable_gqa = True  # the tensors' heads are checked against the spec's
        self._remember(spec)

    def _describe(self, given: dict[str, Any], is_causal: bool, scale: float | None) -> None:
        if is_causal:
            mask = given.get("mask")
            if mask is not None and not isinstance(mask, str):
                raise ArgumentError("is_causal beside a function as mask: write (q >= k) into the function")
            given["mask"] = "q >= k" if mask is None else f"q >= k and ({mask})"
        description = Description(self.mode, False, scale, self.return_lse, given)
        spec, captured = description.spec("fp16", 64, 64, None)  # mistakes show here, whatever the tensors will be
        for name, array in captured.items():
            self.register_buffer(name, torch.as_tensor(array), persistent=False)
        self._captured = tuple(captured)
        self._number = register(description)
        self._remember(spec)

    def _remember(self, spec: AttentionSpec) -> None:
        """What a call needs of the spec, as plain values."""
        self._inputs = tuple(i.name for i in spec.inputs)
        self._params = {p.name: (str(p.type), p.default) for p in spec.params}
        self._ints = tuple(p.name for p in spec.params if p.type is Type.INT)
        self._floats = tuple(p.name for p in spec.params if p.type is Type.FLOAT)
        self._defaults: tuple[Any, ...] | None = None
        if not spec.params and not spec.inputs:
            self._defaults = ()
        elif not spec.inputs and all(p.default is not None for p in spec.params):
            self._defaults = self._arguments({})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **named: Any) -> Any:
        """O, or (O, lse); see `attngen.torch.attention`."""
        if self._text is None and self._number is None:
            refuse_unknown(list(named), [])
            return attention(
                q, k, v, attn_mask, is_causal=self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa, mode=self.mode,
                return_lse=self.return_lse, layout=self.layout, copy=self.copy,
            )  # fmt: skip
        if attn_mask is not None:
            raise ArgumentError("this attention says its own mask; declare a dense one as an input of the spec")
        q, k, v = (heads_first(t, n, self.layout, self.copy) for t, n in ((q, "q"), (k, "k"), (v, "v")))
        if not self.enable_gqa and q.shape[1] != k.shape[1]:
            raise ArgumentError(f"`q` has {q.shape[1]} heads and `k` {k.shape[1]}; pass enable_gqa=True to share them")
        text = self._text
        if text is None:
            assert self._number is not None
            text = spec_text(self._number, q.dtype, head_size(q), head_size(v), None)
        arguments = self._arguments(named) if named or self._defaults is None else self._defaults
        output, lse = attention_operator(q, k, v, text, *arguments)
        if self.layout == "bshd":
            output = output.transpose(1, 2)
        return (output, lse) if self.return_lse else output

    def _arguments(self, named: Mapping[str, Any]) -> tuple[list[Tensor], list[int], list[float]]:
        """(inputs, int params, float params) in the order of their declaration. Raises ArgumentError."""
        refuse_unknown(list(named), [*self._inputs, *self._params])
        numbers = check_params(self._params, named)
        inputs = [self._input(name, named) for name in self._inputs]
        return inputs, [int(numbers[n]) for n in self._ints], [float(numbers[n]) for n in self._floats]

    def _input(self, name: str, named: Mapping[str, Any]) -> Tensor:
        if name in named:
            return named[name]
        if name in self._captured:
            return getattr(self, name)
        raise ArgumentError(f"input `{name}` was not given; pass {name}=...")

    def extra_repr(self) -> str:
        """What is printed between the parentheses."""
        return f"mode={self.mode}, layout={self.layout}" + (f", inputs={self._inputs}" if self._inputs_known() else "")

    def _inputs_known(self) -> bool:
        return bool(getattr(self, "_inputs", ()))


def _one(spec: AttentionSpec | str | PathLike[str]) -> AttentionSpec:
    if isinstance(spec, AttentionSpec):
        return spec
    loaded = load(spec)
    if isinstance(loaded, tuple):
        raise ArgumentError(
            f"{spec} holds several attentions ({', '.join(s.name for s in loaded)}); load it and pass one of them"
        )
    return loaded

"""`Attention`: a layer that computes any attention that the language can describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from operator import index
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from attngen.api import load
from attngen.device.arrays import ArgumentError
from attngen.device.params import refuse_unknown
from attngen.diagnostics import counted, refuse_keywords
from attngen.language import define
from attngen.plan.plan import WIDEST_HEAD
from attngen.sdpa import check_dropout, check_equal_heads, check_flags, plain_scale, written_scale
from attngen.spec.attention import AttentionSpec
from attngen.spec.check import check
from attngen.spec.dropout import RNG_STATE, without_dropout
from attngen.spec.expr import Const
from attngen.spec.scales import SOFTMAX_SCALE
from attngen.torch.append import NO_SCALES
from attngen.torch.arguments import NamedArguments, tensor, unpacked
from attngen.torch.cached import Cache, Decoding, Reader, attended, decoding_of, decoding_text
from attngen.torch.check_cache import Place, scales_of
from attngen.torch.description import (
    Description,
    Mode,
    Written,
    check_mode,
    fixed_text,
    head_size,
    schedule_of,
    shared,
    spec_text,
    standard_text,
    without_functions,
)
from attngen.torch.front import Call, Front
from attngen.torch.functional import attention
from attngen.torch.layout import (
    AXES,
    as_tensor,
    check_layout,
    check_tensors,
    follow_autocast,
    heads_first,
    results,
)

NOTHING: Mapping[str, Tensor] = {}
NO_INPUTS = decoding_of(define())  # for torch's attention in a cache


@dataclass(slots=True)
class Form:
    """A layer's attention as calls have it: with dropout in training, or without. It has a text, or a description that the
    element type and the head sizes of a call complete."""

    arguments: NamedArguments
    decoding: Decoding
    text: str | None = None
    description: Description | None = None
    described: str = ""  # the description's repr


def arguments_in_evaluation(evaluated: AttentionSpec, trained: AttentionSpec) -> NamedArguments:
    """The arguments of a layer after `.eval()`: those that select the weights to drop may be given, as in training."""
    drops_no_more = trained.dropout is not None and evaluated.dropout is None
    return NamedArguments(evaluated, ("seed", "offset", RNG_STATE.name) if drops_no_more else ())


class Attention(torch.nn.Module):
    """An attention as a layer.

    `Attention(spec)` runs an AttentionSpec, or the one of a name, as `attngen.load` takes it. `Attention(mask=...,
    score=..., ...)` describes one by the keywords of `attngen.define`, as text of the language or as functions; element type
    and head sizes come with the tensors. Parameters that functions capture become parameters of the layer, other arrays its
    buffers, of up to 8 dimensions: `.to()` moves them, `state_dict()` holds them, and calls see their changes. Numbers that
    they refer to are those of the time when the layer is made.
    With `return_lse`, or if a spec states it, calls return (O, lse). Head sizes of a spec are those of the tensors, without
    padding: the spec's scale belongs to them.
    Without mask, score, sink and inputs it is torch's attention, and `forward` also takes a dense mask.

    `dropout`, or a spec's own that is a number, drops weights in training and none after `.eval()`, as torch's layers do.

    forward(q, k, v=None, attn_mask=None, **named) takes captured inputs and params by name; see `attngen.torch.attention` for
    the rest.
    """

    def __init__(
        self,
        spec: AttentionSpec | str | PathLike[str] | None = None,
        *,
        mask: Written = None,
        score: Written = None,
        sink: Written = None,
        dropout: float = 0.0,
        rotary: str | None = None,
        inputs: Mapping[str, tuple[str, tuple[int | str, ...]]] | None = None,
        params: Mapping[str, object] | None = None,
        normalize: str = "softmax",
        precision: str = "highest",
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        mode: Mode = "auto",
        return_lse: bool = False,
        layout: str = "bhsd",
        copy: bool = False,
        deterministic: bool | None = None,
        **unknown: object,
    ) -> None:
        super().__init__()
        if unknown:
            refuse_keywords("Attention", unknown, [name for name in signature(Attention).parameters if name != "unknown"])
        check_mode(mode)
        check_layout(layout)
        check_flags(is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse, copy=copy)
        if deterministic is not None:
            check_flags(deterministic=deterministic)
        check_dropout(dropout, "dropout")
        # Private, so that captured arrays may be called `scale` or `mode`.
        self._enable_gqa, self._layout, self._copy, self._deterministic = enable_gqa, layout, copy, deterministic
        self._is_causal, self._mode, self._return_lse = is_causal, mode, return_lse
        self._scale: Any = plain_scale(scale)
        self._written_scale, self._numbers = written_scale(self._scale)  # as the spec has it, and the params of each call
        described = {"mask": mask, "score": score, "sink": sink, "rotary": rotary, "inputs": inputs, "params": params}
        given = {name: value for name, value in described.items() if value is not None}
        if normalize != "softmax":
            given["normalize"] = normalize
        if precision != "highest":
            given["precision"] = precision
        self._dtype: torch.dtype | None = None  # the type that a spec states
        self._spec: AttentionSpec | None = None  # if it says that V is a part of K
        self._dropout = dropout
        self._front = Front()
        self._forms: tuple[Form, ...] = ()  # in evaluation and in training; none: torch's attention
        self._captured: tuple[str, ...] = ()
        if spec is not None:
            if given or is_causal or scale is not None or dropout:
                raise ArgumentError("the spec states mask, score and scale; pass either a spec or the keywords")
            self._take_spec(spec if isinstance(spec, AttentionSpec) else load(spec))
        elif given:
            self._describe(given | ({"dropout": dropout} if dropout else {}))

    def _take_spec(self, spec: AttentionSpec) -> None:
        self._return_lse = self._return_lse or spec.lse
        spec = replace(spec, lse=self._return_lse)
        check(spec)
        self._dtype = getattr(torch, spec.dtype.torch)
        self._spec = None if spec.values is None else spec
        self._enable_gqa = True  # the tensors' heads are checked against the spec's
        specs = (without_dropout(spec) if isinstance(spec.dropout, Const) else spec, spec)
        evaluation, training = (fixed_text(one, schedule_of(self._mode)) for one in specs)
        self._forms = (
            Form(arguments_in_evaluation(*specs), decoding_of(specs[0]), evaluation),
            Form(NamedArguments(spec), decoding_of(spec), training),
        )

    def _describe(self, given: dict[str, object]) -> None:
        some = "fp32" if "precision" in given else "fp16"
        size = WIDEST_HEAD if "rotary" in given else 64  # as many elements as may be rotated
        keywords, captured = without_functions(given, some, size)  # mistakes show here, whatever the tensors will be
        if SOFTMAX_SCALE in {*keywords.get("inputs", {}), *keywords.get("params", {})}:  # a name of the caller
            self._written_scale, self._numbers = None if self._scale is None else str(self._scale), {}
        described = ({name: value for name, value in keywords.items() if name != "dropout"}, keywords)
        evaluation, training = (
            shared(Description(self._mode, self._is_causal, self._written_scale, self._return_lse, one)) for one in described
        )
        for name, array in captured.items():
            self._register(name, array)
        self._captured = tuple(captured)
        spec = training.spec(some, size, size, None)
        evaluated = spec if evaluation is training else evaluation.spec(some, size, size, None)
        self._forms = (
            Form(arguments_in_evaluation(evaluated, spec), decoding_of(evaluated), None, evaluation, repr(evaluation)),
            Form(NamedArguments(spec), decoding_of(spec), None, training, repr(training)),
        )

    def _register(self, name: str, array: object) -> None:
        if hasattr(self, name):
            raise ArgumentError(f"the captured array `{name}` has the name of an attribute of the layer; rename the variable")
        if isinstance(array, torch.nn.Parameter):
            self.register_parameter(name, array)
        else:
            self.register_buffer(name, as_tensor(array))

    def forward(self, q: Tensor, k: Tensor, v: Tensor | None = None, attn_mask: Tensor | None = None, **named: Any) -> Any:
        """O, or (O, lse); see `attngen.torch.attention`. `v` is left out if a spec says that it is a part of k."""
        if self._spec is not None:
            check_tensors(k=k)
            v = self._spec.values_of(k, v)
        if v is None:
            raise ArgumentError("`v` was not given")
        if attn_mask is not None:
            check_tensors(q=q, attn_mask=attn_mask)
        if not self._forms:
            refuse_unknown(list(named), ["seed", "offset"] if self._dropout else [])
            dropout_p = self._dropout if self.training else 0.0
            return attention(
                q, k, v, attn_mask, dropout_p, self._is_causal, self._scale, self._enable_gqa, mode=self._mode,
                return_lse=self._return_lse, layout=self._layout, copy=self._copy, deterministic=self._deterministic, **named,
            )  # fmt: skip
        evaluation, training = self._forms
        form = training if self.training else evaluation
        if attn_mask is not None:
            if "attn_mask" not in form.arguments.names:
                raise ArgumentError(
                    "this layer has its own mask; to use a dense one, declare it as an input and write it into the mask"
                )
            named["attn_mask"] = attn_mask
        if self._numbers:
            named = {**named, **self._numbers}
        given = form.arguments.with_state(named, getattr(q, "device", None))  # what is no tensor is refused below
        captured = {name: getattr(self, name) for name in self._captured} if self._captured else NOTHING
        inputs, params = form.arguments.unchecked(given, captured)
        if params is not None:
            params = (*params, self.training)
        outputs = self._front.call((q, k, v, *inputs), params, self._described, q, k, v, form, given, captured)
        return results(outputs, q, self._layout, self._return_lse)

    def _described(
        self, q: Tensor, k: Tensor, v: Tensor, form: Form, given: Mapping[str, object], captured: Mapping[str, Tensor]
    ) -> Call:
        """The operator's call, with `given` arguments by name."""
        q, k, v = follow_autocast(*heads_first(q, k, v, self._layout), self._dtype)
        if not self._enable_gqa:
            check_equal_heads(q, k)
        text = self._text(form, q, v, captured)
        lists = (form.arguments.with_tensors if self._mode == "math" else form.arguments.lists)(given, captured)
        call = Call((q, k, v, text, *lists), self._mode, self._deterministic, self._copy)
        return call if form.text is not None else call.padded()

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        append_scales: tuple[object, object] = (None, None),
        **named: object,
    ) -> Any:
        """This attention of the last rows of sequences to the keys of a cache: O, or (O, lse).

        q [batch, q_heads, q_len, size], k_cache and v_cache [batch, kv_heads, cache_len, size], or by the layer's layout. The
        result is that of the last q_len rows of a sequence with as many rows as keys: in the mask and the score, q and k are
        positions in it, q_len and kv_len its length, and so `causal` is right for prefill and decoding alike. Inputs with a
        dimension q_len have an element for each row of q; dropout drops nothing.

        Sequence i has the first cache_seqlens[i] keys of its cache (an int, or int32 [batch]; all of them by default, and if
        the number is larger), from cache_leftpad[i] on (int32 [batch]). k and v [batch, kv_heads, new_len, size] are first
        written to the cache, in place, after the keys that are there; what does not fit is left out. If the spec is rotary,
        they are rotated on the way: a cache holds rotated keys. q is rotated in any case. Sequence i lies in cache i, or in
        cache cache_batch_idx[i] (int32 [batch]). With `block_table` int32 [batch, max_pages], caches are pools of pages,
        [pages, kv_heads, page_size, size]. That a cache or a page of a sequence exists is not checked. Rows after the last key
        of a sequence may hold anything, NaN too; those before cache_leftpad must hold numbers, such as zeros.

        If the spec's K and V have 8 bits, q, k and v have the type of its queries: k and v are divided by `append_scales`, (of
        K, of V), each a number or a tensor fp32 that broadcasts to [batch, kv_heads, new_len], or by the layer's layout, and
        rounded to nearest, ties to even. What is beyond the largest number of the type becomes that number, and NaN stays NaN.
        They are what the spec says by `scaled k by` and `scaled v by` of the new rows, which the call reads as any input.

        Lengths are read on the device: a CUDA graph replays with others. No gradients. Raises ArgumentError; with mode "math",
        DiagnosticError for an index of the spec that depends on the length of a sequence, unless it is clamped.
        """
        if self._spec is not None:
            check_tensors(k_cache=k_cache)
            v_cache = self._spec.values_of(k_cache, v_cache)
            v = v if k is None else self._spec.values_of(k, v)
            if self._spec.rotary is not None:
                raise ArgumentError("a cache whose values are a part of keys has no `rotary`: rotate q and k before the call")
        if v_cache is None:
            raise ArgumentError("`v_cache` was not given")
        form = self._forms[0] if self._forms else None
        decoding = NO_INPUTS if form is None else form.decoding
        captured = {name: getattr(self, name) for name in self._captured} if self._captured else NOTHING
        if self._numbers and form is not None:
            named = {**named, **self._numbers}
        inputs, ints, floats = unpacked(decoding.lists(named, captured))
        with torch.no_grad():
            rows, k_cache, v_cache = self._rows("q", q), self._rows("k_cache", k_cache), self._rows("v_cache", v_cache)
            if not self._enable_gqa:
                check_equal_heads(rows.transpose(1, 2), k_cache.transpose(1, 2))
            new = [None if one is None else self._rows(name, one) for name, one in (("k", k), ("v", v))]
            scales = NO_SCALES
            if any(one is not None for one in append_scales):
                if k is None:
                    raise ArgumentError("`append_scales` is of rows that are appended; pass `k` and `v` too")
                of_k, of_v = (self._scale_rows(one) for one in append_scales)
                given = {"append_scales[0]": of_k, "append_scales[1]": of_v}
                scales = scales_of(rows, k_cache, self._rows("k", k).shape[1], **given)
            place = Place(cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
            attention = partial(self._attend_cache, form, captured, inputs, ints, floats)
            reader = Reader(attention, self._front, inputs, (tuple(ints), tuple(floats)))
            turn, as_dense = decoding.turn(inputs), self._mode == "math"
            result = attended(rows, k_cache, v_cache, new, turn, place, reader, as_dense, self._spec is not None, scales)
        return results(result, q, self._layout, self._return_lse)

    def _attend_cache(
        self,
        form: Form | None,
        captured: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        ints: Sequence[int],
        floats: Sequence[float],
        cache: Cache,
        only_checks: bool = False,
    ) -> Any:
        """The operator's results for the rows of `cache`. With `only_checks`, nothing runs: None, or an error."""
        decoding = NO_INPUTS if form is None else form.decoding
        queries, keys, values = (one.transpose(1, 2) for one in (cache.q, cache.keys, cache.values))
        if cache.lengths.storage == "paged":  # pages are never copied
            page_size = index(keys.shape[2])
        else:
            (queries, keys, values), page_size = heads_first(queries, keys, values, "bhsd"), None
        queries, keys, values = follow_autocast(queries, keys, values, self._dtype)
        first, longest, known = cache.lengths.arguments
        text = decoding_text(self._text(form, queries, values, captured), known, cache.lengths.storage, page_size)
        inputs, ints, floats = decoding.kept(inputs, ints, floats)
        if form is None:
            floats = [*self._numbers.values()]
        tensors, ints = (*first, *inputs), [*longest, *ints]
        call = Call((queries, keys, values, text, list(tensors) or None, ints, floats), self._mode, None, self._copy)
        if form is None or form.text is None:
            call = call.padded()
        if only_checks:
            return call.check()
        return self._front.call((queries, keys, values, *tensors), (text, *ints, *floats), lambda: call)

    def _scale_rows(self, scale: object) -> object:
        """A scale that broadcasts to [batch, heads, length], of the layer's layout, as [batch, length, heads]."""
        if not isinstance(scale, torch.Tensor) or scale.dim() not in (2, 3) or self._layout == "bshd":
            return scale
        return scale.transpose(-1, -2)

    def _rows(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the layer's layout as [batch, length, heads, size]. Raises ArgumentError."""
        check_tensors(**{name: tensor})
        if tensor.dim() != 4:
            raise ArgumentError(f"`{name}` has {counted(tensor.dim(), 'dimension')}; expected 4, of {AXES[self._layout]}")
        return tensor if self._layout == "bshd" else tensor.transpose(1, 2)

    def _text(self, form: Form | None, queries: Tensor, values: Tensor, captured: Mapping[str, Tensor]) -> str:
        """The text of `form` for a call; of torch's attention without one."""
        if form is None:
            sizes = (head_size(queries), head_size(values))
            described = (self._mode, self._is_causal, self._written_scale, self._return_lse, queries.dtype, *sizes, None)
            return str(standard_text(*described))
        if form.text is not None:
            return form.text
        dtypes = tuple((name, tensor(name, value).dtype) for name, value in captured.items())
        return spec_text(form.described, queries.dtype, head_size(queries), head_size(values), dtypes)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        for form in self._forms:
            if form.description is not None:
                form.description = shared(form.description)

    def extra_repr(self) -> str:
        """What is printed between the parentheses."""
        inputs = self._forms[True].arguments.inputs if self._forms else ()
        return f"mode={self._mode}, layout={self._layout}" + (f", inputs={inputs}" if inputs else "")

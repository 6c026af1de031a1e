"""The words of a generated file's comments: equations, shapes, reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

from attngen.emit.program import Tensor
from attngen.plan.plan import Decision
from attngen.spec.attention import AttentionSpec
from attngen.spec.gradient import CapturedGradient, Gradient
from attngen.spec.operator import FLOAT_ONE
from attngen.spec.print_attn import expression_to_text, rotary_to_text, shown

HEADER_WIDTH = 118
WEIGHING = {"softmax": "the softmax", "sigmoid": "the sigmoid", "none": "the scores"}  # what comes between the products
RECOMPUTED = {"softmax": "exp(S - lse)", "sigmoid": "1 / (1 + exp(-S))", "none": "S"}  # weights, in a backward
# Bytes of S and P that the unfused kernels move for each pair: a score is written once and read once, by a softmax twice; a
# weight too, unless it is the score itself.
PAIR_BYTES = {"softmax": 20, "sigmoid": 16, "none": 8}


def expression_texts(spec: AttentionSpec, gradient: Gradient | None = None) -> dict[str, str]:
    """The spec's expressions as the language writes them, for comments, and their derivatives."""
    return {
        "derivative": shown(gradient.ds) if gradient else "",
        "scale": expression_to_text(spec.scale),
        "score": expression_to_text(spec.score),
        "mask": expression_to_text(spec.mask) if spec.mask is not None else "",
        "sink": expression_to_text(spec.sink) if spec.sink is not None else "",
        "v_scale": expression_to_text(spec.v_scale) if spec.v_scale is not None else "",
        "dropout": expression_to_text(spec.dropout) if spec.dropout is not None else "",
        "masked": "0" if spec.normalize == "none" else "-inf",
    }


def shape_text(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def shape_line(tensor: Tensor) -> str:
    role = {"input": "", "output": ", written", "workspace": ", workspace", "counter": ", counter"}[tensor.role]
    return f"{tensor.name:<4} {tensor.dtype} {shape_text(tensor)}{role}"


def equations(spec: AttentionSpec, lse: bool) -> list[str]:
    text = expression_texts(spec)
    lines = []
    if spec.rotary is not None:
        lines.append(f"Q, K = rows rotated by their positions: rotary {rotary_to_text(spec.rotary)}")
    lines.append(f"s    = {expression_to_text(spec.scale)} * sum over d of Q[q, d] * K[k, d]")
    if spec.values is not None:
        lines.append(f"V    = K[:, {spec.values[0]}:{spec.values[1]}]")
    where = f" where {text['mask']}, else {text['masked']}" if text["mask"] else ""
    lines.append(f"S[k] = {text['score']}{where}")
    lines += weights_equations(spec, lse)
    of_v = f"V[k, d] * ({text['v_scale']})" if text["v_scale"] else "V[k, d]"
    if spec.dropout is None:
        return [*lines, f"O[d] = sum over k of P[k] * {of_v}"]
    return [*lines, dropout_equation(spec), f"O[d] = sum over k of D[k] * P[k] * {of_v}"]


def dropout_equation(spec: AttentionSpec) -> str:
    """What dropout multiplies the weights with."""
    assert spec.dropout is not None
    p = expression_to_text(spec.dropout)
    return f"D[k] = 1 / (1 - {p}) with probability 1 - {p}, else 0: random bits of rng_state, b, h, q, k"


def backward_equations(spec: AttentionSpec, gradient: Gradient, wanted: Sequence[str]) -> list[str]:
    """The derived equations of the gradients that are wanted, in the notation of `equations`, whose first ones are repeated."""
    text = expression_texts(spec, gradient)
    forward = equations(spec, False)[:-1]
    kept = "D[k] * " if spec.dropout is not None else ""
    where = f" where {text['mask']}, else 0" if text["mask"] else ""
    scale, ds = expression_to_text(spec.scale), "dS" if gradient.ds is FLOAT_ONE else "ds"
    lines = [*forward, f"dP[k] = {kept}(sum over d of dO[q, d] * V[k, d]){where}", *score_gradient_equations(spec)]
    if ds == "ds":
        lines.append(f"ds[k] = dS[k] * ({text['derivative']})")
    if "q" in wanted:
        lines.append(f"dQ[d] = {scale} * sum over k of {ds}[k] * K[k, d]")
    if {"k", "v"} & {*wanted}:
        lines.append("and for each key k of a key/value head, over the rows q of the query heads that share it:")
    if "k" in wanted:
        lines.append(f"    dK[d] = {scale} * sum over h, q of {ds}[q, k] * Q[q, d]")
    if "v" in wanted:
        kept = "D[q, k] * " if spec.dropout is not None else ""
        lines.append(f"    dV[d] = sum over h, q of {kept}P[q, k] * dO[q, d]")
    of_captured = [one for one in gradient.captured if one.name in wanted]
    if of_captured:
        lines.append("and added up over all b, h, q and, where it occurs, k:")
    if spec.rotary is not None and {"q", "k"} & {*wanted}:
        lines.append("and rows of dQ and dK are turned back by the angles of Q and K")
    return [*lines, *(f"    {line}" for one in of_captured for line in captured_equations(spec, gradient, one))]


def captured_equations(spec: AttentionSpec, gradient: Gradient, captured: CapturedGradient) -> list[str]:
    """What each pair, or each row, adds to the gradient of a captured tensor or param."""
    ds = "dS" if gradient.ds is FLOAT_ONE else "ds"
    of_source = {"score": "dS[q, k]", "scale": f"{ds}[q, k] * Q K^T[q, k]", "sink": "-P_sink[q] * delta[q]"}
    lines = []
    for c in captured.contributions:
        factor = "" if c.factor is FLOAT_ONE else f" * ({shown(c.factor)})"
        lines.append(f"d_{shown(c.element)} += {of_source[c.source]}{factor}")
    if any(c.source == "sink" for c in captured.contributions):
        assert spec.sink is not None
        sink = expression_to_text(spec.sink)
        lines.append(f"with P_sink = exp({sink}) / (sum over k of exp(S[k]) + exp({sink}))")
    return lines or [f"d_{captured.name} = 0: what reads it does not change smoothly with it"]


def score_gradient_equations(spec: AttentionSpec) -> list[str]:
    """dS, the gradient of the scores, from the weights and their gradient."""
    match spec.normalize:
        case "sigmoid":
            return ["dS[k] = dP[k] * P[k] * (1 - P[k])"]
        case "none":
            return ["dS[k] = dP[k]"]
    minus = " - dlse" if spec.lse else ""
    return [f"delta = sum over k of P[k] * dP[k]{minus}", "dS[k] = P[k] * (dP[k] - delta)"]


def weight_gradient_equation(spec: AttentionSpec) -> str:
    """dP of all pairs."""
    kept = "" if spec.dropout is None else "D[q, k] * "
    where = f"   where {expression_to_text(spec.mask)}, else 0" if spec.mask is not None else ""
    return f"dP[q, k] = {kept}sum over d of dO[q, d] * V[k, d]{where}"


def pair_equations(spec: AttentionSpec, gradient: Gradient, of_scores: bool) -> list[str]:
    """P of a tile, recomputed from lse, and with `of_scores` the gradients of its scores."""
    text = expression_texts(spec, gradient)
    where = f"   where {text['mask']}, else 0" if text["mask"] else ""
    lines = [f"P  = {RECOMPUTED[spec.normalize]}  with S = {text['score']}{where}"]
    if not of_scores:
        return lines
    dp = "dO V^T" if spec.dropout is None else "D * (dO V^T)"
    score_gradients = {"softmax": f"P * ({dp} - delta)", "sigmoid": f"({dp}) * P * (1 - P)", "none": dp}
    lines.append(f"dS = {score_gradients[spec.normalize]}{where}")
    return [*lines, f"ds = dS * ({text['derivative']})"] if gradient.ds is not FLOAT_ONE else lines


def delta_equations(spec: AttentionSpec, gradient: Gradient, own: Mapping[str, str]) -> tuple[str, ...]:
    """P of a tile, recomputed from lse, and delta as a sum over keys; `own` are the workspaces that replace numbers of rows, by
    the names of these."""
    dp = "dO V^T" if spec.dropout is None else "D * (dO V^T)"
    sink = f" + exp({expression_to_text(spec.sink)} - lse)" if spec.sink is not None else ""
    weights = f"(sum over keys of P{sink})"
    delta = f"delta = (sum over keys of P * ({dp})) / {weights}{' - dlse' if spec.lse else ''}"
    of_lse = [f"{workspace} = {name} + log{weights}, with which the kernels below compute P" for name, workspace in own.items()]
    return *pair_equations(spec, gradient, False), delta, *of_lse


def product_equations(spec: AttentionSpec, gradient: Gradient) -> list[str]:
    """The same where dP is a product by itself, and dS is that of scaled dot products."""
    text = expression_texts(spec, gradient)
    dp = "dP" if spec.dropout is None else "D * dP"
    ds = {"softmax": f"P * ({dp} - delta)", "sigmoid": f"{dp} * P * (1 - P)", "none": dp}[spec.normalize]
    if gradient.ds is not FLOAT_ONE:
        ds = f"({ds}) * ({text['derivative']})"
    where = f"   where {text['mask']}, else 0" if text["mask"] else ""
    first = f"S = {text['score']},  s = softmax_scale * Q K^T,  dP = dO V^T"
    return [first, f"P = {RECOMPUTED[spec.normalize]}{where}", f"dS = {ds}{where}"]


def weights_equations(spec: AttentionSpec, lse: bool) -> list[str]:
    match spec.normalize:
        case "sigmoid":
            return ["P[k] = 1 / (1 + exp(-S[k]))"]
        case "none":
            return ["P[k] = S[k]"]
    sink = f" + exp({expression_to_text(spec.sink)})" if spec.sink is not None else ""
    written = ["lse  = log(sum over k of exp(S[k])" + sink + ")"] if lse else []
    return [f"P[k] = exp(S[k]) / (sum over k of exp(S[k]){sink})", *written]


def fused_equations(spec: AttentionSpec, lse: bool, bounded: bool = False) -> list[str]:
    """The loop of a fused kernel; `bounded`: a constant is subtracted from all scores, not a maximum."""
    if spec.normalize != "softmax":
        return ["for every tile of keys:", "    S = score(Q K^T);  P = weights of S;  O += P V"]
    if bounded:
        return [
            "l = 0, O = 0; for every tile of keys:",
            "    S = score(Q K^T)                      -inf where the mask forbids",
            "    P = exp(S - a constant)               which all weights of a row have, and O / l does not",
            "    l = l + row sum of P",
            "    O = O + P V",
            "O = O / l" + (";  lse = the constant + log(l)" if lse else ""),
        ]
    return [
        "m = -inf, l = 0, O = 0; for every tile of keys:",
        "    S  = score(Q K^T)                     -inf where the mask forbids",
        "    m' = max(m, row maximum of S)",
        "    P  = exp(S - m')",
        "    l  = l * exp(m - m') + row sum of P",
        "    O  = O * exp(m - m') + P V",
        "    m  = m'",
        *([] if spec.sink is None else ["the sink joins as one more score, whose value is 0"]),
        "O = O / l" + (";  lse = m + log(l)" if lse else ""),
    ]


def wrapped(text: str) -> list[str]:
    """`text` as lines that fit beside code."""
    return wrap(text, HEADER_WIDTH - 8, break_long_words=False)


def wrapped_list(items: list[str]) -> list[str]:
    """`items` with commas between them, as lines that fit; no item is broken."""
    lines = [items[0]]
    for item in items[1:]:
        longer = f"{lines[-1]}, {item}"
        if len(longer) <= HEADER_WIDTH:
            lines[-1] = longer
        else:
            lines.append(item)
    return lines


def decision_lines(decision: Decision) -> list[str]:
    """A decision as comment lines."""
    head = f"{decision.field} = {decision.value}: "
    return wrap(head + decision.because, HEADER_WIDTH - 8, subsequent_indent="    ")

"""The words of a generated file's comments: equations, shapes, reasons."""

from __future__ import annotations

from textwrap import wrap

from attngen.emit.kernel_source import TensorSpec
from attngen.plan.plan import Decision
from attngen.spec.attention import AttentionSpec
from attngen.spec.print_attn import expression_to_text

HEADER_WIDTH = 118
WEIGHING = {"softmax": "the softmax", "sigmoid": "the sigmoid", "none": "the scores"}  # what comes between the products
# Bytes of S and P that the unfused kernels move for each pair: a score is written once and read once, by a softmax twice; a
# weight too, unless it is the score itself.
PAIR_BYTES = {"softmax": 20, "sigmoid": 16, "none": 8}


def expression_texts(spec: AttentionSpec) -> dict[str, str]:
    """The spec's expressions as the language writes them, for comments."""
    return {
        "score": expression_to_text(spec.score),
        "mask": expression_to_text(spec.mask) if spec.mask is not None else "",
        "sink": expression_to_text(spec.sink) if spec.sink is not None else "",
        "masked": "0" if spec.normalize == "none" else "-inf",
    }


def shape_text(tensor: TensorSpec) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def shape_line(tensor: TensorSpec) -> str:
    role = {"input": "", "output": ", written", "workspace": ", workspace", "counter": ", counter"}[tensor.role]
    return f"{tensor.name:<4} {tensor.dtype} {shape_text(tensor)}{role}"


def equations(spec: AttentionSpec) -> list[str]:
    text = expression_texts(spec)
    lines = [f"s    = {expression_to_text(spec.scale)} * sum over d of Q[q, d] * K[k, d]"]
    where = f" where {text['mask']}, else {text['masked']}" if text["mask"] else ""
    lines.append(f"S[k] = {text['score']}{where}")
    lines += weights_equations(spec)
    return [*lines, "O[d] = sum over k of P[k] * V[k, d]"]


def weights_equations(spec: AttentionSpec) -> list[str]:
    match spec.normalize:
        case "sigmoid":
            return ["P[k] = 1 / (1 + exp(-S[k]))"]
        case "none":
            return ["P[k] = S[k]"]
    sink = f" + exp({expression_to_text(spec.sink)})" if spec.sink is not None else ""
    lse = ["lse  = log(sum over k of exp(S[k])" + sink + ")"] if spec.lse else []
    return [f"P[k] = exp(S[k]) / (sum over k of exp(S[k]){sink})", *lse]


def fused_equations(spec: AttentionSpec, bounded: bool = False) -> list[str]:
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
            "O = O / l",
        ]
    return [
        "m = -inf, l = 0, O = 0; for every tile of keys:"
        if spec.sink is None
        else "m = sink, l = 1, O = 0; for every tile of keys:",
        "    S  = score(Q K^T)                     -inf where the mask forbids",
        "    m' = max(m, row maximum of S)",
        "    P  = exp(S - m')",
        "    l  = l * exp(m - m') + row sum of P",
        "    O  = O * exp(m - m') + P V",
        "    m  = m'",
        "O = O / l" + (";  lse = m + log(l)" if spec.lse else ""),
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

"""What `attngen list E215` shows of a mistake or warning: why it is one, statements that make it, statements to write instead.

Statements are those of an attention of fp16 with head_dim 64, unless they state these themselves; some are whole texts.
"""

from __future__ import annotations

from typing import NamedTuple


class Example(NamedTuple):
    """Without `wrong`, the mistake does not fit a line."""

    why: str
    wrong: str = ""
    right: str = ""


EXAMPLES: dict[str, Example] = {
    # --- the text
    "E001": Example("A character that no statement contains.", "mask q >= k $", "mask q >= k"),
    "E002": Example("A word or symbol where something else is expected.", "mask >= k", "mask q >= k"),
    "E003": Example(
        "A brace or bracket is open at the end.", "attention a { dtype fp16", "attention a { dtype fp16 head_dim 64 }"
    ),
    "E004": Example("A text is limited in size, so that reading it takes a bounded time."),
    "E005": Example("Nesting is limited, so that no tool overflows its stack. A long chain of operators counts as nesting."),
    "E006": Example(
        "Integers have 64 bits, and floats the range of fp32.",
        "let n = 9223372036854775808 mask k < n",
        "let n = 4096 mask k < n",
    ),
    "E007": Example("An .attn file is text in UTF-8."),
    "E008": Example("A notation of C, Python, PyTorch or LaTeX.", "mask q >= k && k < 3", "mask q >= k and k < 3"),
    # --- statements
    "E101": Example(
        "A text needs an attention; definitions alone compute nothing.",
        "def past = q >= k",
        "attention a { dtype fp16 head_dim 64 mask causal }",
    ),
    "E102": Example(
        "Files and kernels are named after an attention.",
        "attention a { dtype fp16 head_dim 64 } attention a { dtype bf16 head_dim 64 }",
        "attention a { dtype fp16 head_dim 64 } attention b { dtype bf16 head_dim 64 }",
    ),
    "E103": Example("A word that begins no statement.", "masks causal", "mask causal"),
    "E104": Example("Each key/value head serves the same number of query heads.", "heads 32 over 12", "heads 32 over 8"),
    "E105": Example(
        "Only input, param, let and def may occur twice.", "mask causal mask window(8)", "mask causal and window(8)"
    ),
    "E106": Example(
        "dtype and head_dim have no default.", "attention a { dtype fp16 }", "attention a { dtype fp16 head_dim 64 }"
    ),
    "E107": Example(
        "Q, K, V and O are fp16, bf16 or fp32; inputs may be integers and bool too.",
        "input x: fp8[heads] score s * x[h]",
        "input x: fp16[heads] score s * x[h]",
    ),
    "E108": Example(
        "Rows are copied 16 bytes at a time, 8 elements of 16 bits.", "dtype fp16 head_dim 100", "dtype fp16 head_dim 96"
    ),
    "E109": Example("Rows are read 8 elements at a time.", "dtype fp16 head_dim 4", "dtype fp16 head_dim 8"),
    "E110": Example("Without `heads`, the tensors of a call determine their numbers.", "heads 0", "heads 8"),
    "E111": Example(
        "Names of an attention share one space, with those that generated code derives from them.",
        "param n: int let n = 3 mask k < n + n",
        "param n: int let m = 3 mask k < n + m",
    ),
    "E112": Example(
        "Names become names in CUDA, beside those of C++ and of the language.",
        "let float = 3 mask k < float",
        "let my_float = 3 mask k < my_float",
    ),
    "E113": Example("Names are limited in length."),
    "E114": Example(
        "A dimension that is spelled almost like a size.",
        "input x: fp32[kv_lens] score s + x[k]",
        "input x: fp32[kv_len] score s + x[k]",
    ),
    "E115": Example(
        "Dimensions have from 1 to 2^29 elements.", "input x: fp32[0] score s * x[0]", "input x: fp32[1] score s * x[0]"
    ),
    "E116": Example(
        "An input has at most 8 dimensions.",
        "input x: fp32[1, 1, 1, 1, 1, 1, 1, 1, n] score s * x[0, 0, 0, 0, 0, 0, 0, 0, h]",
        "input x: fp32[n] score s * x[h]",
    ),
    "E117": Example(
        "A param is an int or a float; tensors are inputs.", "param n: int64 mask k < n", "param n: int mask k < n"
    ),
    "E118": Example(
        "A default is a constant of the param's type.", "param n: int = 1.5 mask k < n", "param n: int = 1 mask k < n"
    ),
    "E119": Example("Rows are normalized by softmax or sigmoid, or not at all.", "normalize softmx", "normalize softmax"),
    "E120": Example("O is returned always, and lse on request.", "output logits", "output lse"),
    "E121": Example("`attngen list` shows the schedules.", "kernel fuse", "kernel fused"),
    "E122": Example(
        "No GPU has room for it. A tile within the limits is the planner's to refuse, which names those that fit.",
        "kernel fused { tile 1000 x 64 }",
        "kernel fused { tile 128 x 64 }",
    ),
    "E123": Example(
        "Products are as exact as their type, or faster.",
        "dtype fp32 head_dim 64 precision hihg",
        "dtype fp32 head_dim 64 precision high",
    ),
    "E124": Example(
        "How the arrays of a call lie in memory.", "kernel fused { storage paked }", "kernel fused { storage packed }"
    ),
    "E125": Example("A share from 0 to below 1: what is kept is divided by 1 - p.", "dropout 1.0", "dropout 0.1"),
    "E126": Example("The share is one number of a call.", "param p: float dropout p / 2.0", "param p: float dropout p"),
    "E127": Example(
        "A share of a call from 0 to below 1: p = 1.5 is refused.", "param p: float dropout p", "param p: float dropout p"
    ),
    "E128": Example(
        "The fragments of Q stay in registers or shared memory.", "kernel fused { q register }", "kernel fused { q registers }"
    ),
    "E129": Example(
        "Models pair the elements of a row in two ways.",
        "input c: fp32[n, 32] input d: fp32[n, 32] rotary 64 half by c, d",
        "input c: fp32[n, 32] input d: fp32[n, 32] rotary 64 halves by c, d",
    ),
    "E130": Example(
        "A multiple of 16 elements is rotated, at most head_dim.",
        "input c: fp32[n, 33] input d: fp32[n, 33] rotary 66 halves by c, d",
        "input c: fp32[n, 32] input d: fp32[n, 32] rotary 64 halves by c, d",
    ),
    "E131": Example(
        "A table has a row for each position, and a column for each pair.",
        "input c: fp32[n, 64] input d: fp32[n, 64] rotary 64 halves by c, d",
        "input c: fp32[n, 32] input d: fp32[n, 32] rotary 64 halves by c, d",
    ),
    "E132": Example(
        "Positions are rows of the tables.",
        "input c: fp32[n, 32] input d: fp32[n, 32] rotary 64 halves by c, d at 0.5 * q, k",
        "input c: fp32[n, 32] input d: fp32[n, 32] rotary 64 halves by c, d at q // 2, k",
    ),
    "E133": Example(
        "A pool of pages is a cache, whose keys are rotated when they are appended.",
        "input c: fp32[n, 32] input d: fp32[n, 32] rotary 64 halves by c, d kernel fused { storage paged }",
        "kernel fused { storage paged }",
    ),
    "E134": Example("V is columns of K that a row has.", "values k[0:128]", "values k[0:64]"),
    "E136": Example("Warnings are allowed by their codes.", "mask q > k allow W28", "mask q > k allow W208"),
    "E135": Example("Keys and values have scales, and V may be a part of K.", "scaled q by 0.5", "scaled k by 0.5"),
    # --- expressions
    "E201": Example("A name that nothing declares.", "mask causl", "mask causal"),
    "E202": Example(
        "Each statement has its own names: `s` is the score's, `k` is not a sink's.", "sink 0.1 * k", "sink 0.1 * q"
    ),
    "E203": Example(
        "Only functions are called; inputs are indexed.",
        "input t: fp32[heads] score s * t(h)",
        "input t: fp32[heads] score s * t[h]",
    ),
    "E204": Example("A function has a fixed number of arguments.", "mask window(1, 2)", "mask window(1)"),
    "E205": Example(
        "Operators take truth values or numbers; nothing becomes a truth value by itself.",
        "mask causal and k",
        "mask causal and k < 8",
    ),
    "E206": Example("A mask says which pairs take part.", "mask q - k", "mask q >= k"),
    "E207": Example("A score is a number.", "score q >= k", "score where(q >= k, s, 0.0)"),
    "E208": Example(
        "An input has one index for each dimension, its batch too.",
        "input ids: int32[batch, kv_len] mask ids[q] == ids[k]",
        "input ids: int32[batch, kv_len] mask ids[b, q] == ids[b, k]",
    ),
    "E209": Example("Only inputs have elements.", "score s * h[0]", "score s * h"),
    "E210": Example(
        "A tensor is read by its indices.", "input t: fp32[heads] score s * t", "input t: fp32[heads] score s * t[h]"
    ),
    "E211": Example(
        "Definitions are expanded, so none can contain itself.",
        "def f(n) = f(n - 1) mask f(q)",
        "def f(n) = n + 1 mask f(q) >= k",
    ),
    "E212": Example("Definitions are expanded where they are used; definitions of definitions grow fast."),
    "E213": Example(
        "Integers are exact in 64 bits for all lengths and params of a call.", "mask q * q * k * k < 5", "mask q * k < 5"
    ),
    "E214": Example(
        "The index is outside for every call.", "input t: fp32[16] score s * t[16]", "input t: fp32[16] score s * t[15]"
    ),
    "E215": Example(
        "Nothing keeps the index inside: the range of an element of a tensor is unknown, and so is that of an integer made of "
        "a float without bounds.",
        "input t: fp32[16] input ids: int32[batch, kv_len] score s + t[ids[b, k]]",
        "input t: fp32[16] input ids: int32[batch, kv_len] score s + t[clamp(ids[b, k], 0, 15)]",
    ),
    "E216": Example(
        "An integer divided by 0 has no value.",
        "input n: int32[heads] mask (q - k) % n[h] == 0",
        "input n: int32[heads] mask (q - k) % max(n[h], 1) == 0",
    ),
    "E217": Example("A comparison is a truth value.", "mask 0 <= q - k < 8", "mask 0 <= q - k and q - k < 8"),
    "E218": Example(
        "`let` is a constant; `def` may read indices.",
        "let half = q_len // 2 mask k < half",
        "def half = q_len // 2 mask k < half",
    ),
    "E219": Example(
        "What nothing reads is probably forgotten.", "input t: fp32[heads] score s", "input t: fp32[heads] score s * t[h]"
    ),
    "E220": Example("lse is that of a softmax.", "normalize sigmoid output lse", "normalize softmax output lse"),
    "E221": Example("A sink is a logit of a softmax.", "normalize sigmoid sink 0.0", "normalize softmax sink 0.0"),
    "E222": Example("A score that is infinite for all pairs has no softmax.", "score inf", "score where(q >= k, s, -inf)"),
    "E223": Example("A function needs its arguments.", "mask causal and window", "mask causal and window(64)"),
    "E224": Example("Declarations and attentions of a text are limited in number."),
    "E225": Example(
        "fp16 products are exact in fp32; the approximate tanh needs a tanh.",
        "precision high",
        "score softcap(30.0) precision high",
    ),
    "E226": Example(
        "Scores of the prelude contain `s`.",
        "input t: fp32[heads] score s + alibi(t)",
        "input t: fp32[heads] score alibi(t)",
    ),
    "E227": Example(
        "With the lengths and params of a call, an index is outside: 8 heads read a tensor of 1.",
        "input m: bool[batch, 1, q_len, kv_len] mask m[b, h, q, k]",
        "input m: bool[batch, heads, q_len, kv_len] mask m[b, h, q, k]",
    ),
    "E228": Example(
        "A param of a call makes a divisor 0: d = 0.", "param d: int mask k % d == 0", "param d: int mask k % max(d, 1) == 0"
    ),
    "E229": Example("Kernels divide a sink by the scale; -inf means no sink.", "sink -1e38", "sink -1e30"),
    "E230": Example("Masks, scores and their gradients are limited in length, so that compilers take seconds."),
    "E301": Example(
        "A kernel, tile or number of stages that the planner was told, and that the GPU or the schedule does not have.",
        "kernel fused { tile 100 x 64 }",
        "kernel fused { tile 128 x 64 }",
    ),
    # --- warnings
    "W201": Example(
        "The mask has no effect.",
        "input t: int32[batch, kv_len] mask t[b, k] == t[b, k]",
        "input t: int32[batch, kv_len] mask t[b, q] == t[b, k]",
    ),
    "W202": Example("O is 0 everywhere.", "mask causal and q < k", "mask causal and q - k < 8"),
    "W203": Example(
        "By default, s is Q K^T / sqrt(head_dim).", "score s / sqrt(head_dim)", "scale 1.0 score s / sqrt(head_dim)"
    ),
    "W204": Example("Without `s`, weights depend on positions alone.", "score -0.1 * abs(q - k)", "score s - 0.1 * abs(q - k)"),
    "W205": Example(
        "A part of a mask or a condition of a score that has no effect. In Python functions, only comparisons of a value with "
        "itself are reported: other conditions may be due to a number that the function closes over.",
        "mask causal and k < kv_len",
        "mask causal and k < kv_len - 1",
    ),
    "W206": Example(
        "`where` whose condition has one value is one of its branches.",
        "score where(k >= 0, s, -inf)",
        "score where(k > 0, s, -inf)",
    ),
    "W207": Example(
        "softmax(S + c) = softmax(S): a bias by head or row changes no weight. With a sink, `output lse` or another "
        "normalization it has an effect, and there is no warning.",
        "input bias: fp32[heads] score s + bias[h]",
        "input bias: fp32[heads, kv_len] score s + bias[h, k]",
    ),
    "W208": Example("A row without keys gives O = 0; q > k leaves none to query 0.", "mask q > k", "mask q >= k"),
    "W209": Example(
        "A mask of queries gives O = 0 to rows, and lets all others see padding.",
        "input lengths: int32[batch] mask q < lengths[b]",
        "input lengths: int32[batch] mask k < lengths[b]",
    ),
    "W210": Example(
        "An index that is made of b, h, q or k, and always the same.",
        "input t: fp32[heads, 1] score s * t[h, clamp(k - q, 0, 0)]",
        "input t: fp32[heads, 9] score s * t[h, clamp(k - q, 0, 8)]",
    ),
    "W211": Example("What no statement reads is probably forgotten.", "def near = q - k < 8 mask causal", "mask causal"),
}

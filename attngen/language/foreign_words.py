"""Words and symbols of C, Python, PyTorch and FlexAttention that this language lacks, with their replacements."""

from __future__ import annotations

import re
from typing import NamedTuple

from attngen.diagnostics import Diagnostic
from attngen.source import SourceFile, Span
from attngen.spec import mistakes
from attngen.spec.suspicions import SCALES as SCALES


class Spelling(NamedTuple):
    """A pattern of foreign text, the label at its caret, and the replacement. `{1}` is the pattern's first group; the caret is
    under the group `found`, if there is one."""

    pattern: str
    label: str
    help: str


MAX_LINE = 2000  # characters: longer lines are not searched
_KEYWORDS = "dtype|head_dim|values|heads|mask|score|scale|sink|scaled|dropout|rotary|normalize|precision|output|kernel|allow"
COMMENT = "comments begin with `#`"
_DECLARED = "static|const|constexpr|auto|int|float|double|long|unsigned|var|val"
_DTYPES = "fp32|fp16|bf16|int32|int64|bool|float32|float16|bfloat16|float|half|int"
_MODULES = "math|torch|np|numpy|attngen|F|tl|jnp|jax|std"

# The first pattern that covers the position of a syntax error explains it.
SPELLINGS = (
    Spelling(r"/\*.*?(?:\*/|$)|\*/", COMMENT, "write # before the comment"),
    Spelling(r"//(?=\s*[A-Za-z_]+\s+[A-Za-z_]+\b).*", COMMENT, "write # instead of //"),
    Spelling(r"(?<=[\w)}\]])\s*(//)(?=\s*$)|^\s*(//)", COMMENT, "write # instead of //"),
    Spelling(r"\{\s*(?P<found>//.*)", COMMENT, "write # instead of //"),
    Spelling(
        r"\binput\s+\w+\s*:\s*\w+\s*\[[^\]\n]*?(?P<found>\.\.\.|-\d+|[*:?])[^\]\n]*\]",
        "a dimension is a name or a number",
        "write a name of your own, such as n: the tensor determines this size",
    ),
    Spelling(r"\binput\s+\w+\s*:\s*\w+\s*\[[^\]\n]*\]\s*(?P<found>=)", "a call passes the tensor", "remove the default"),
    Spelling(
        r"\bparam\s+(?P<found>(\w+)\s*:\s*\w+\s*(\[[^\]\n]*\]))", "a param is a number", "write input {2}: fp32{3} for a tensor"
    ),
    Spelling(
        r"\b(?:input|param|let)\s+\w+(?:\s*[:=][^\n,(\[]*(?:\[[^\]\n]*\])?)?\s*(?P<found>,)",
        "a statement declares one name",
        "write a statement for each name",
    ),
    Spelling(
        r"\bdef\s+(\w+)\s*(?P<found>\(\s*\))", "without parameters, there are no parentheses", "write def {1} = expression"
    ),
    Spelling(
        r"\bdef\s+\w+\s*\([^)\n=]*?(?P<found>\w+\s*=\s*[^,)\n]*)", "parameters have no defaults", "write the name alone"
    ),
    Spelling(
        rf"(?:^|\{{)\s*(?P<found>(?:let\s+)?(?!(?:{_KEYWORDS}|def)\b)([A-Za-z_]\w*)\s*\(([^()\n]*)\)\s*=)(?!=)",
        "`def` begins a definition",
        "write def {2}({3}) = expression",
    ),
    Spelling(r"&&", "`and` of two truth values", "write a and b"),
    Spelling(r"\|\|", "`or` of two truth values", "write a or b"),
    Spelling(r"\be\s*(?:\^|\*\*)", "a power of e", "write exp(a)"),
    Spelling(r"\*\*", "a power", "write pow(a, b), or a * a for a square"),
    Spelling(r"(?<=[\w)\]])\s*(?P<found>([-+*/%])=)(?!=)", "an expression changes no value", "write {2} instead of {1}"),
    Spelling(r"([<>!=])\s+=(?![=<>])", "an operator contains no space", "write {1}="),
    Spelling(r"=\s*([<>])(?!=)", "in a comparison, `=` stands last", "write {1}="),
    Spelling(r"!(?!=)", "`not` of a truth value", "write not a"),
    Spelling(r"\?", "a choice between two values", "write where(condition, a, b) for condition ? a : b"),
    Spelling(r"\b(if|else|elif)\b", "a choice between two values", "write where(condition, a, b) for a if condition else b"),
    Spelling(r"(?:^|[{;])\s*(?P<found>(return(?:s|_)?)[ \t]+lse)\b", "O is always returned", "write output lse"),
    Spelling(r"\b(?P<found>return)\b(?:\s*[\w(]+)?", "an expression is its own result", "remove `return`"),
    Spelling(r"\b(?P<found>lambda)\b[^:]*:?", "an expression uses b, h, q, k and, in a score, s", "write the expression alone"),
    *(
        Spelling(rf"\b{op.upper()}\b", "operators are written in small letters", f"write {op}") for op in ("and", "or", "not")
    ),
    Spelling(r"\b(for|while)\b", "there are no loops", "write an expression of one pair (q, k): it is computed for every pair"),
    Spelling(r"\b(?:None|null|nullptr|NULL)\b", "there is no value for nothing", "leave the statement out"),
    Spelling(r"\b(?:nan|NaN|NAN)\b", "NaN has no name", "write a number, or -inf"),
    Spelling(r"===|!==", "a comparison", "write == or !="),
    Spelling(r"<>", "a comparison", "write !="),
    Spelling(r":=", "a definition", "write let NAME = value, or def NAME(x) = expression"),
    Spelling(r"->", "there are no arrows", "remove it; def NAME(x) = expression defines a function"),
    Spelling(r"<<|>>", "a shift", "write a * 2 for a << 1, and a // 2 for a >> 1"),
    Spelling(r"\^", "a power or `exclusive or`", "write pow(a, b), bit_xor(a, b) of integers, or a != b of truth values"),
    Spelling(r"@", "a product of matrices", "Q K^T is computed already: `s` is its element"),
    Spelling(r",(?=\s*$)", "nothing separates statements", "remove `,`: a statement ends where the next one begins"),
    Spelling(r"\([^()\n]*(?P<found>;)", "commas separate arguments", "write , instead of ;"),
    Spelling(r";", "nothing separates statements", "remove `;`: a statement ends where the next one begins"),
    Spelling(
        r"float\(\s*[\"'](-?)\+?inf(?:inity)?[\"']\s*\)", "infinity is a name", "write {1}inf"
    ),
    Spelling(rf"\b(?:{_MODULES})\.(?:inf|Inf|INFINITY|infinity)\b", "infinity is a name", "write inf, or -inf"),
    *(
        Spelling(rf"\b(?:{_MODULES})\.(?:{theirs})\b", "element types have no module", f"write {ours}")
        for theirs, ours in (("float16|half", "fp16"), ("bfloat16", "bf16"), ("float32|float", "fp32"), ("int32|int", "int32"))
    ),
    Spelling(rf"\b(?:{_MODULES})(?:\.\w+)*\.(\w+)", "functions have no module", "write {1}(...); see `attngen list`"),
    Spelling(r"\b([A-Za-z_]\w*)\.([A-Za-z_]\w*)", "there are no methods", "write {2}({1}); see `attngen list`"),
    Spelling(r"\b0[xXbBoO][0-9a-fA-F]+", "numbers are decimal", "write it in decimal"),
    Spelling(r"(?<![\w.])(\d+_[\d_]*\d)", "digits are not grouped", "remove the `_`"),
    Spelling(r"(?<![\w.])(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)[fFlLuUhH]+\b", "numbers have no suffix", "write {1}"),
    Spelling(
        r"\b(?:head_dim|heads|over|tile|stages|warps|page_size|rotary)\s+(?P<found>\d+(?:\.\d*(?:[eE][+-]?\d+)?|[eE][+-]?\d+))",
        "a whole number is expected here",
        "write it with digits alone",
    ),
    Spelling(
        r"\bhead_dim\s+(?P<found>(\d+)\b\s*[,/]?\s*(?:v\s*[=:]?\s*)?(\d+))", "two head sizes", "write head_dim {2}, v {3}"
    ),
    Spelling(
        r"\bhead_dim\s+(\d+)\s+(?P<found>(?:head_dim_v|v_head_dim|head_size_v)\s*[=:]?\s*(\d+))",
        "the head size of V stands behind that of Q and K",
        "write head_dim {1}, v {3}",
    ),
    Spelling(
        r"\b(?P<found>(?:head_dim_v|v_head_dim|head_size_v)\b)",
        "the head size of V stands behind that of Q and K",
        "write both in one statement, such as head_dim 192, v 128",
    ),
    Spelling(r"\btile\s+(\d+)\s*(?P<found>[,*/×])\s*(\d+)", "a tile has rows and keys", "write tile {1} x {3}"),
    Spelling(
        r"\bkernel\s+(\w+)\s*(?P<found>\()",
        "options of a kernel stand in braces",
        "write kernel {1} {{ tile 128 x 64  stages 2 }}",
    ),
    Spelling(
        r"\brotary\s+(?P<found>(\d+)\s+by)\s+\w+",
        "the order of pairs is missing",
        "write rotary {2} halves by, or rotary {2} interleaved by",
    ),
    Spelling(
        rf"\binput\s+(?P<found>({_DTYPES})\s+(\w+)\s*(\[[^\]\n]*\])?)", "the name stands first", "write input {3}: {2}{4}"
    ),
    Spelling(
        r"\binput\s+(?P<found>(\w+)\s*(\[[^\]\n]*\])\s*:\s*(\w+))",
        "dimensions stand behind the element type",
        "write input {2}: {4}{3}",
    ),
    Spelling(
        r"\binput\s+(\w+)\s*:\s*(\w+)\s*(?P<found>\(([^()\n]*)\))",
        "dimensions stand in square brackets",
        "write input {1}: {2}[{4}]",
    ),
    Spelling(r"\bparam\s+(\w+)\s*(?P<found>=)(?!=)\s*(-?\d+)(?![\d.eE])", "a param has a type", "write param {1}: int = {3}"),
    Spelling(
        r"\bparam\s+(\w+)\s*(?P<found>=)(?!=)",
        "a param has a type",
        "write param {1}: float = ..., or param {1}: int = ...",
    ),
    Spelling(r"\blet\s+(\w+)\s*(?P<found>:\s*\w+)", "a constant has no type", "write let {1} = ..., without `{2}`"),
    Spelling(r"\bdef\s+\w+\s*\([^)\n:]*(?P<found>:\s*\w+)", "parameters have no types", "remove `{1}`"),
    Spelling(
        r"\bdef\s+\w+\s*(?:\([^)\n]*\))?\s*(?P<found>:(?:\s*return\b)?)",
        "a definition is an expression",
        "write = instead of `{1}`",
    ),
    Spelling(
        r"\bdef\s+(\w+\s*(?:\([^)\n]*\))?)\s*(?P<found>\{(?:\s*return\b)?)",
        "a definition is an expression",
        "write def {1} = expression, without braces",
    ),
    Spelling(
        r"(\w+)(?P<found>\[([^\[\]\n]*)\]\s*\[([^\[\]\n]*)\])",
        "all indices stand in one pair of brackets",
        "write {1}[{3}, {4}]",
    ),
    Spelling(r"\[[^\[\]\n]*:[^\[\]\n]*\]", "there are no slices", "write q and k: an expression describes one pair (q, k)"),
    Spelling(
        r"(?:[-+*/%(,<>=]|\b(?:mask|score|scale|sink|and|or|not))\s*(?P<found>\|([^|\n]+)\|)",
        "an absolute value",
        "write abs({2})",
    ),
    Spelling(r"\b(?:not\s+)?in\b|[∈∉]", "there are no sets", "write a == b or a == c for a in (b, c)"),
    Spelling(r"\bis(?:\s+not)?\b", "a comparison", "write ==, or != for `is not`"),
    Spelling(r"\"[^\"\n]*\"?|'[^'\n]*'?", "there is no text in expressions", "write names and numbers without quotes"),
    Spelling(
        rf"(?:^|[{{\s])({_KEYWORDS})\s*([:=])(?!=)",
        "nothing stands between a keyword and its value",
        "write `{1}` and the value, without `{2}`",
    ),
    Spelling(
        r"\bheads\s+(\d+)\s*(?P<found>[,:/])\s*(\d+)", "query heads share key/value heads", "write heads {1} over {3}"
    ),
    *(
        Spelling(theirs, "symbols are written in ASCII", f"write {ours}")
        for theirs, ours in (
            ("[≥⩾≧]", ">="), ("[≤⩽≦]", "<="), ("≠", "!="), ("∧", "and"), ("∨", "or"), ("¬", "not"), ("[×·]", "*"),
            ("[−–]", "-"), ("÷", "/"), ("∞", "inf"), ("π", "3.141592653589793"), ("√", "sqrt(a)"), ("²", "a * a"),
            ("³", "a * a * a"), ("[⌊⌋]", "floor(a)"), ("[⌈⌉]", "ceil(a)"),
        )
    ),
    *(
        Spelling(rf"\\(?:{theirs})(?![A-Za-z])", "there are no commands of LaTeX", f"write {ours}")
        for theirs, ours in (
            ("geq?", ">="), ("leq?", "<="), ("neq?", "!="), ("land|wedge", "and"), ("lor|vee", "or"), ("lnot|neg", "not"),
            ("cdot|times", "*"), ("frac", "a / b"), ("infty", "inf"),
        )
    ),
    Spelling(r"\\([A-Za-z]+)", "there are no commands of LaTeX", "write {1}, without the backslash"),
    Spelling(r"(?<=[\w)\]])\s+(?P<found>mod)\b", "the remainder of a division", "write a % b"),
    Spelling(r"(?<=[\w)\]])\s+(?P<found>div)\b", "a quotient rounded down", "write a // b"),
    Spelling(r"(?<=[\w)\]])\s+(?P<found>xor)\b", "exclusive or", "write bit_xor(a, b) of integers, or a != b of truth values"),
    Spelling(
        r"\b(?P<found>all|any|cumsum|mean|norm|prod|softmax|sort|std|sum|topk|var)\s*\(",
        "an expression describes one pair (q, k)",
        "compute it before the call and pass it as an input; `normalize` states how scores become weights",
    ),
    Spelling(
        r"\b(?P<found>rand|randn|random|uniform|bernoulli)\s*\(",
        "an expression has no random numbers",
        "pass a tensor of random numbers as an input",
    ),
    Spelling(r"\b(?P<found>len)\s*\(", "lengths have names", "write q_len or kv_len"),
    Spelling(r"\b(?P<found>[QKV])\s*\[", "only the kernel reads Q, K and V", "write s, the scaled product of row q and key k"),
    Spelling(
        rf"(?:^|\{{)\s*(?P<found>(?:(?:{_DECLARED})\s+)*(?!(?:{_KEYWORDS}|[bhqks])\b)([A-Za-z_]\w*)\s*=)(?!=)",
        "`let` declares a constant, and `param` a number of the call",
        "write let {2} = ..., or param {2}: int = ...",
    ),
    Spelling(
        r"\battention\s+(?P<found>(\d\w*)-(\w+))(?!-)", "a name has letters, digits and underscores", "write my_{2}_{3}"
    ),
    Spelling(r"\battention\s+(?P<found>(\w+)-(\w+))(?!-)", "a name has letters, digits and underscores", "write {2}_{3}"),
    Spelling(
        r"\battention\s+(?P<found>(\d\w*))\s*\{", "a name begins with a letter or an underscore", "write my_{2}"
    ),
    Spelling(r"\battention\s+(?P<found>(\d\w*))", "a name begins with a letter", "write a_{2}"),
    Spelling("[“”„‘’]", "there is no text in expressions", "write names and numbers without quotes"),
    Spelling(r"(?<![\w.])(\d+),(\d+)(?![\w.])", "a decimal number has a point", "write {1}.{2}"),
    Spelling(
        rf"\b(?!(?:{_KEYWORDS}|and|or|not|where)\b)[A-Za-z_]\w*\([^()\n]*?(?P<found>\b(?![bhqks]\b)[A-Za-z_]\w*\s*=)(?!=)",
        "arguments have no names",
        "remove `{1}`",
    ),
    Spelling(r"(?<![=<>!:])=(?!=)", "`=` gives a value to a name; it does not compare", "write == to compare"),
)  # fmt: skip

# Foreign names, and the names of this language with the same meaning.
NAMES = {
    **dict.fromkeys(("q_idx", "q_index", "q_pos", "query", "query_idx", "row", "i", "m", "q_i"), "q"),
    **dict.fromkeys(("kv_idx", "k_idx", "kv_index", "kv", "key", "key_idx", "col", "j", "kv_i"), "k"),
    **dict.fromkeys(("b_idx", "batch_idx", "z"), "b"),
    **dict.fromkeys(("h_idx", "head", "head_idx"), "h"),
    **dict.fromkeys(("score", "qk", "logit", "logits", "scores", "dot"), "s"),
    **dict.fromkeys(("seqlen_q", "seq_len_q", "len_q", "Lq", "q_length"), "q_len"),
    **dict.fromkeys(("seqlen_k", "seq_len_k", "seqlen", "seq_len", "len_k", "kv_length", "Lk"), "kv_len"),
    **dict.fromkeys(("num_heads", "n_heads", "nheads", "H", "Hq"), "heads"),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "Hkv"), "kv_heads"),
    **dict.fromkeys(("batch_size", "bsz", "B"), "batch"),
    **dict.fromkeys(("head_size", "d_head", "D", "d", "d_k", "dk"), "head_dim"),
    **dict.fromkeys(("INFINITY", "Infinity", "infinity", "Inf", "INF"), "inf"),
    **dict.fromkeys(("True", "TRUE"), "true"),
    **dict.fromkeys(("False", "FALSE"), "false"),
    **dict.fromkeys(("fabs", "fabsf", "absolute"), "abs"),
    **dict.fromkeys(("fminf", "fmin", "minimum"), "min"),
    **dict.fromkeys(("fmaxf", "fmax", "maximum"), "max"),
    **dict.fromkeys(("power", "powf"), "pow"),
    **dict.fromkeys(("arctan2", "atan2f"), "atan2"),
    **dict.fromkeys(("select", "ifelse", "iif", "cond"), "where"),
    **{f"{name}f": name for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sin", "cos", "floor", "ceil")},
    **dict.fromkeys(("ln",), "log"),
    **dict.fromkeys(("trunc", "long", "int32", "int64"), "int"),
    **dict.fromkeys(("float32", "fp32"), "float"),
    **dict.fromkeys(("is_causal", "causal_mask"), "causal"),
    **dict.fromkeys(("sliding_window", "local"), "window"),
    **dict.fromkeys(("clip",), "clamp"),
    **dict.fromkeys(("pi", "PI", "M_PI"), "3.141592653589793"),
}  # fmt: skip


def spelling_at(source: SourceFile, line: int, column: int) -> Diagnostic | None:
    """The mistake for a foreign spelling at this position; None if there is none."""
    text = source.line(line).split("#")[0]
    if len(text) > MAX_LINE:
        return None
    for spelling in SPELLINGS:
        for match in re.finditer(spelling.pattern, text):
            if match.start() < column <= match.end():
                return _diagnostic(source, line, spelling, match)
    return None


def comment_at(source: SourceFile, line: int, column: int) -> Diagnostic:
    """The mistake for a comment that begins with `//` at this position."""
    text = source.line(line)
    span = Span(source, line, column, line, len(text.rstrip()) + 1)
    return mistakes.ForeignSpelling(span=span, found="//", label_text=COMMENT, cure="write # instead of //")


def _diagnostic(source: SourceFile, line: int, spelling: Spelling, match: re.Match[str]) -> Diagnostic:
    group = "found" if "found" in match.re.groupindex else 0
    found = match[group].strip()
    start = match.end(group) - len(match[group].lstrip())
    groups = [match[0], *(text or "" for text in match.groups())]
    span = Span(source, line, start + 1, line, start + len(found) + 1)
    shown = found if len(found) <= 40 else f"{found[:37]}..."
    return mistakes.ForeignSpelling(span=span, found=shown, label_text=spelling.label, cure=spelling.help.format(*groups))

"""Words that cannot be names in generated CUDA.

A name of a spec becomes a member of a struct (`in.slopes`) and a part of longer names (`slopes_at`, `captured_slopes`). A
member may have the name of any type, function or variable, but not of a keyword, a macro (which is replaced everywhere), or a
type that the struct itself uses. These are few and known, so names need no prefix.
"""

from __future__ import annotations

import re

# Keywords and alternative tokens of C++11 to C++26 (ISO/IEC 14882, [lex.key] and [lex.digraph]), those that compilers add in
# their GNU modes, and `main`, whose use C++ restricts.
CXX_WORDS = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
    concept const consteval constexpr constinit const_cast continue contract_assert co_await co_return co_yield decltype
    default delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline int long
    main mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
    reinterpret_cast requires restrict return short signed sizeof static static_assert static_cast struct switch template
    this thread_local throw true try typedef typeid typename typeof union unsigned using virtual void volatile wchar_t while
    xor xor_eq
    """.split()  # noqa: SIM905
)

# Macros of compilers in their GNU modes, of NVRTC and CUDA's headers, and of the C headers that the emulated device includes.
MACROS = re.compile(
    r"linux|unix|i386|mips|sparc|sun|m68k|vax|hpux|arm"
    r"|NULL|EOF|NAN|INFINITY|MAXFLOAT|RAND_MAX|NOMINMAX|errno|assert|offsetof|stdin|stdout|stderr|math_errhandling"
    r"|isnan|isinf|isfinite|isnormal|signbit|fpclassify|alloca|strdupa|strndupa"
    r"|va_(?:start|arg|end|copy)|(?:EXIT|MATH|MB|FD|FP|M|HUGE|INT|UINT|LONG|ULONG|CHAR|FLT|DBL)_\w+"
    r"|SNAN\w*|(?:BIG|LITTLE|PDP|BYTE)_(?:ENDIAN|ORDER)|NFDBITS|W(?:NOHANG|UNTRACED|STOPPED|CONTINUED|EXITED|NOWAIT)|CUDA\w+"
    r"|cuda[A-Z]\w*|threadIdx|blockIdx|blockDim|gridDim|warpSize"
)

# Types that the struct of captured values uses, and the struct.
TYPES = frozenset(("fp16", "bf16", "Captured"))


def reserved_reason(name: str) -> str:
    """The reason why `name` cannot be a name in generated code; empty if it can."""
    if name in CXX_WORDS:
        return "it is a keyword of C++, the language of the generated code"
    if MACROS.fullmatch(name):
        return "it is a macro of C or CUDA, which would change the generated code"
    if name in TYPES:
        return "it is a type of generated code"
    if name.startswith("_") or "__" in name:
        return "C++ reserves names that begin with an underscore or contain two in a row"
    return ""

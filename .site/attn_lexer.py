"""The attention language for pygments: the words of its grammar, and what the language and its prelude define."""

from __future__ import annotations

import re
from importlib.resources import files

from pygments.lexer import RegexLexer, bygroups, words
from pygments.lexers import LEXERS
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, Text

from attngen.language.prelude import prelude
from attngen.spec.operators import FUNCTIONS

__all__ = ["AttnLexer"]

GRAMMAR = next(f for f in files("attngen.language").iterdir() if f.name.endswith(".lark")).read_text()
KEYWORDS = [word for word in re.findall(r"^_[A-Z_]+: /(\w+)\\b/", GRAMMAR, re.M) if len(word) > 1]


class AttnLexer(RegexLexer):
    name = "attn"
    aliases = ("attn",)
    filenames = ("*.attn",)
    tokens = {  # noqa: RUF012
        "root": [
            (r"#[^\n]*", Comment.Single),
            (words(("and", "or", "not"), suffix=r"\b"), Operator.Word),
            (r"^(attention)(\s+)(\w+)", bygroups(Keyword, Text, Name.Class)),
            (rf"^[ \t]*(?:{'|'.join(KEYWORDS)})\b|\bover\b", Keyword),
            (words((*FUNCTIONS, *prelude()), prefix=r"\b", suffix=r"\b"), Name.Builtin),
            (r"\d+\.\d*(?:e[+-]?\d+)?|\.\d+|\d+", Number),
            (r"\n|[ \t]+", Text),
            (r"\w+", Name),
            (r"[-+*/%<>=!]+", Operator),
            (r".", Punctuation),
        ]
    }


# By this table `pygments.lexers` finds what a block of code is said to be.
LEXERS[AttnLexer.__name__] = (__name__, AttnLexer.name, AttnLexer.aliases, AttnLexer.filenames, ())

"""The attention language for pygments: the words of its grammar, and what the language and its prelude define."""

from __future__ import annotations

import re
from importlib.resources import files

from pygments.lexer import Lexer, RegexLexer, bygroups, words
from pygments.lexers import LEXERS, BashLexer, CudaLexer, DiffLexer
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, Punctuation, Text

from attngen.language.prelude import prelude
from attngen.spec.operators import FUNCTIONS

__all__ = ["AttnLexer", "SessionLexer"]

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


class SessionLexer(Lexer):
    """Commands after `$ ` and what they print: CUDA of `attngen show`, specs and diffs of `cat`, else text."""

    name = "attngen-session"
    aliases = ("attngen-session",)
    filenames = ()
    # a command, and how its output is highlighted
    languages = (
        (re.compile(r"attngen show (?!.*--stage)"), CudaLexer),
        (re.compile(r"attngen diff .*\| grep|cat \S+\.diff"), DiffLexer),
        (re.compile(r"cat \S+\.attn"), AttnLexer),
    )

    def get_tokens_unprocessed(self, text):
        at = 0
        for part in re.split(r"^(?=\$ )", text, flags=re.M):
            found = re.match(r"\$ ((?:.*\\\n)*.*\n?)", part)
            if found is None:
                yield at, Generic.Output, part
            else:
                yield at, Generic.Prompt, "$ "
                yield from _moved(BashLexer(), found[1], at + 2)
                output, begin = part[found.end() :], at + found.end()
                of_command = (lexer for pattern, lexer in self.languages if pattern.match(found[1]))
                lexer = next(of_command, None)
                if lexer is None:
                    yield begin, Generic.Output, output
                else:
                    yield from _moved(lexer(), output, begin)
            at += len(part)


def _moved(lexer, text, begin):
    for at, kind, value in lexer.get_tokens_unprocessed(text):
        yield begin + at, kind, value


# By this table `pygments.lexers` finds what a block of code is said to be.
for each in (AttnLexer, SessionLexer):
    LEXERS[each.__name__] = (__name__, each.name, each.aliases, each.filenames, ())

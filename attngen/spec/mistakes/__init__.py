"""Users' mistakes in a spec, one dataclass for each kind, by stage: E0 the text, E1 statements, E2 expressions."""

from attngen.spec.mistakes.expressions import *  # noqa: F403
from attngen.spec.mistakes.statements import *  # noqa: F403
from attngen.spec.mistakes.text import *  # noqa: F403

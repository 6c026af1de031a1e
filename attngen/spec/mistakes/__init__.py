"""Users' mistakes in a spec, one dataclass for each kind, by stage: E0 the text, E1 statements, E2 expressions; W2 what is
valid, but unlikely to be meant."""

from attngen.spec.mistakes.expressions import *  # noqa: F403
from attngen.spec.mistakes.statements import *  # noqa: F403
from attngen.spec.mistakes.suspicions import *  # noqa: F403
from attngen.spec.mistakes.text import *  # noqa: F403

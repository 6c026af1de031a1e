"""Text, or Python functions, -> AttentionSpec."""

from attngen.language.load import Loaded, load_file, load_path, load_source, load_text
from attngen.language.python_spec import define, traced
from attngen.spec.print_attn import to_text

__all__ = ["Loaded", "define", "load_file", "load_path", "load_source", "load_text", "to_text", "traced"]

"""Fills the cache on disk with the entries that a wheel contains: of every template, and of the parser.

    ATTNGEN_CACHE_DIR=DIRECTORY python -m attngen.inspect.packaged_cache

A wheel's build runs it with the requirements of the build alone, so it imports neither numpy nor CUDA.
"""

from __future__ import annotations

from attngen.cache.disk_cache import DiskCache
from attngen.device.compiled_templates import keep_compiled_templates
from attngen.emit.emitter import environment
from attngen.emit.templates import template_directory
from attngen.language.syntax import parse_expression
from attngen.source import SourceFile


def main() -> None:
    """Raises SystemExit if an entry is missing in the end."""
    keep_compiled_templates()
    included = (*template_directory().rglob("*.j2"), *(template_directory() / "parts").rglob("*.cuh"))
    templates = [path.relative_to(template_directory()).as_posix() for path in included]
    for name in templates:
        environment().get_template(name)
    parse_expression(SourceFile("an expression", "q"))
    for kind, count in {"templates": len(templates), "parser": 1}.items():
        cache = DiskCache(kind)
        if (kept := len(cache.entries())) != count:
            raise SystemExit(f"{cache.directory} has {kept} entries; expected {count}")


if __name__ == "__main__":
    main()

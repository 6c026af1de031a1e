"""The build of a wheel adds entries of the cache, so that the first command on a machine does not make them."""

from __future__ import annotations

import os
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PackagedCache(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Makes the entries; a failure ends the build. An editable installation has none: they would not fit changed files."""
        if version == "editable":
            return
        self.made = TemporaryDirectory()
        command = [sys.executable, "-B", "-m", "attngen.inspect.packaged_cache"]
        subprocess.run(command, cwd=self.root, env={**os.environ, "ATTNGEN_CACHE_DIR": self.made.name}, check=True)
        build_data["force_include"][self.made.name] = "attngen/_cache"

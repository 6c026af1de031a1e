"""Which Chromium the tests of pages use."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 300_000.0  # milliseconds until playwright gives up: a busy machine fails no test


def find_browser() -> str | None:
    """A Chromium on the PATH, or the one that `playwright install chromium` brought; None without either, or playwright."""
    if find_spec("playwright") is None:
        return None
    on_path = next((path for path in map(shutil.which, NAMES) if path), None)
    if on_path is not None:
        return on_path
    root = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    found = sorted(p for p in root.glob("chromium*-*/*/*") if p.name in ("chrome", "headless_shell", "chrome-headless-shell"))
    return str(found[-1]) if found else None


def launch_options() -> dict[str, object]:
    """For playwright's `chromium.launch`. Chromium's own sandbox does not start for root."""
    return {"executable_path": find_browser(), "args": ["--no-sandbox"] if os.geteuid() == 0 else []}

"""The Chromium for tests of pages."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 300_000.0  # milliseconds of playwright's timeout, long enough for a busy machine


def find_browser() -> str | None:
    """A Chromium on the PATH, or that of `playwright install chromium`; None without either, or without playwright."""
    if find_spec("playwright") is None:
        return None
    on_path = next((path for path in map(shutil.which, NAMES) if path), None)
    if on_path is not None:
        return on_path
    root = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    found = sorted(p for p in root.glob("chromium*-*/*/*") if p.name in ("chrome", "headless_shell", "chrome-headless-shell"))
    return str(found[-1]) if found else None


def launch_options() -> dict[str, object]:
    """Arguments of playwright's `chromium.launch`. Chromium's sandbox does not work for root."""
    return {"executable_path": find_browser(), "args": ["--no-sandbox"] if os.geteuid() == 0 else []}

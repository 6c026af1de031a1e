"""The notebook of docs/, executed; `python -m tests.notebook` updates its stored outputs."""

from __future__ import annotations

from typing import Any

import nbclient
import nbformat

from tests.conftest import ROOT

PATH = ROOT / "docs" / "first_kernel.ipynb"


def stored() -> Any:
    """The notebook of the repository."""
    return nbformat.read(PATH, as_version=4)


def executed() -> Any:
    """The notebook with new outputs, without execution times."""
    fresh = stored()
    nbclient.NotebookClient(fresh, timeout=None, resources={"metadata": {"path": str(ROOT)}}).execute()
    for cell in fresh.cells:
        cell.metadata.pop("execution", None)
    return fresh


def outputs(cell: Any) -> str:
    """The output and the result of a cell."""
    found = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", ()))
    return "".join(found).strip()


if __name__ == "__main__":
    nbformat.write(executed(), PATH)

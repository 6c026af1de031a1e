"""The notebook of docs/, executed; `python -m tests.notebook` updates its stored outputs."""

from __future__ import annotations

import tempfile
from typing import Any

import nbclient
import nbformat

from tests.conftest import ROOT
from tests.tour import environment

PATH = ROOT / "docs" / "first_kernel.ipynb"


def stored() -> Any:
    """The notebook of the repository."""
    return nbformat.read(PATH, as_version=4)


def executed() -> Any:
    """The notebook with new outputs, without execution times."""
    fresh = stored()
    with tempfile.TemporaryDirectory() as place:
        nbclient.NotebookClient(fresh, timeout=None, resources={"metadata": {"path": place}}).execute(env=environment())
    for cell in fresh.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if "text" in output:
                output["text"] = output["text"].replace("\r\n", "\n")  # commands print to a terminal
    return fresh


def outputs(cell: Any) -> str:
    """The output and the result of a cell."""
    found = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", ()))
    return "".join(found).strip()


if __name__ == "__main__":
    nbformat.write(executed(), PATH)

"""The names of the package, and the exceptions of its calls."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest

import attngen
from attngen.shipped import shipped_specs
from tests.conftest import ROOT


def test_every_name_is_listed_and_found() -> None:
    listed = dir(attngen)
    assert {*attngen.__all__, "where", "tanh", "__version__"} <= set(listed)
    for name in listed:
        assert getattr(attngen, name) is not None
    assert attngen.where is attngen.where
    assert attngen.where.__name__ == "where"
    assert re.fullmatch(r"\d+\.\d+\.\d+", attngen.__version__)


def test_type_checkers_read_its_annotations() -> None:
    assert (Path(attngen.__file__).parent / "py.typed").is_file()  # PEP 561


@pytest.mark.parametrize("function", [attngen.define, attngen.traced])
def test_define_has_real_keywords(function) -> None:
    assert {"dtype", "head_dim", "mask", "score", "lse", "tile"} <= set(inspect.signature(function).parameters)
    name = function.__name__
    assert "`mask`, `score` and `sink`" in " ".join((inspect.getdoc(function) or "").split())
    with pytest.raises(TypeError, match=f"{name} has no keyword `maks`; did you mean `mask`?"):
        function(maks="causal")
    with pytest.raises(TypeError, match=f"{name} takes keywords"):
        function("causal")


def test_shipped_specs_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = attngen.load(ROOT / "specs" / "gpt2.attn")
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert attngen.load("gpt2") == shipped
    with pytest.raises(FileNotFoundError, match="did you mean `gpt2`"):
        attngen.compile("gpt22")
    with pytest.raises(FileNotFoundError, match=r"the shipped spec is called gpt2, without \.attn"):
        attngen.compile("gpt2.attn")
    with pytest.raises(FileNotFoundError, match="no file and no shipped spec"):
        attngen.compile("gpt22.attn")
    for name in ("x" * 300, f"{'x' * 300}/gpt2.attn", "attention a { " + "x" * 300):  # longer than the name of a file may be
        with pytest.raises(FileNotFoundError, match="no file and no shipped spec"):
            attngen.compile(name)


def test_an_attention_of_a_file_with_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, everywhere = attngen.load_all("gemma2")
    assert attngen.load("gemma2_local") == attngen.load("gemma2:gemma2_local") == local
    assert attngen.load(ROOT / "specs" / "models" / "gemma2.attn:gemma2_global") == everywhere
    with pytest.raises(attngen.ArgumentError, match="name one of them: gemma2:gemma2_local or gemma2:gemma2_global"):
        attngen.compile("gemma2")
    with pytest.raises(attngen.ArgumentError, match=r"gemma2\.attn has no attention called local; it has gemma2_local"):
        attngen.load("gemma2:local")
    with pytest.raises(FileNotFoundError, match="did you mean `gemma2_local`"):
        attngen.load("gemma2_locl")
    with pytest.raises(FileNotFoundError, match=r"did you mean `gemma2`.*'gema2'"):
        attngen.load("gema2:gemma2_local")
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b:c"):  # a file's own name goes first
        (tmp_path / name).write_text("attention c { dtype fp16 head_dim 64 } attention d { dtype bf16 head_dim 64 }")
        assert [spec.name for spec in attngen.load_all(name)] == ["c", "d"]
        assert attngen.load(f"{name}:d").dtype.name == "bf16"


def test_every_shipped_attention_is_found_by_its_name() -> None:
    for path in shipped_specs().values():
        for spec in attngen.load_all(path):
            assert attngen.load(f"{path.stem}:{spec.name}") == spec
            found = attngen.load_all(spec.name)
            assert spec in found or spec.name in shipped_specs(), "else the file of that name"


# Caught inside: an ExpressionError becomes a DiagnosticError or a TraceError, an UntrustedError a CacheWarning, a NotComputed a
# note of `check --against`.
INTERNAL = {"ExpressionError", "UntrustedError", "TimeLimitError", "NotComputed"}


def test_every_exception_and_warning_is_documented() -> None:
    """By itself or by a base, in the table of docs/python.md, with the classes that the table says each one also is."""
    rows = re.findall(r"^\| `attngen\.(\w+)` \| (.*?) \|", (ROOT / "docs" / "python.md").read_text(), re.M)
    documented = {name: re.findall(r"`(\w+)`", bases) for name, bases in rows}
    for name, bases in documented.items():
        assert bases
        assert set(bases) <= {c.__name__ for c in getattr(attngen, name).__mro__[1:]}, name
    seen = set()
    without = (
        "torch",
        "transformers",
        "diffusers",
        "jax",
        "vllm",
        "bench",
        "__main__",
    )  # these define none, and import what may be missing
    for module in pkgutil.walk_packages(attngen.__path__, "attngen."):
        if module.name.split(".")[1] in without:
            continue
        for found in vars(import_module(module.name)).values():
            if isinstance(found, type) and issubclass(found, Exception) and found.__module__.startswith("attngen"):
                seen.add(found.__name__)
                assert {c.__name__ for c in found.__mro__} & {*documented, *INTERNAL}, f"{found} is not in docs/python.md"
    assert set(documented) <= seen

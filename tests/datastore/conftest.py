"""Distributions made of real files: a module and the metadata that pip would have written."""

import sys
from pathlib import Path

import pytest

_STRANGER = Path(__file__).parent / "stranger"


@pytest.fixture
def stranger(monkeypatch):
    """Put the distribution stranger-vectors on the path, as if it were installed."""
    monkeypatch.syspath_prepend(_STRANGER)
    yield
    sys.modules.pop("stranger_vectors", None)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that makes a distribution with one module and puts it on the path."""
    before = set(sys.modules)

    def install(name, entry_points, source="", *, extras=(), requires=()):
        site = tmp_path / name
        metadata = site / f"{name.replace('-', '_')}-2.0.dist-info"
        metadata.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 2.0"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (metadata / "METADATA").write_text("\n".join(lines) + "\n")
        (metadata / "entry_points.txt").write_text(f"[knnstore.datastores]\n{entry_points}\n")
        (site / f"{name.replace('-', '_')}.py").write_text(source)
        monkeypatch.syspath_prepend(site)

    yield install
    for module in set(sys.modules) - before:
        del sys.modules[module]

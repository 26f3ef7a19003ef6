"""The adapter that docs/write-an-adapter.md builds, installed as a stranger's distribution."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from knnstore.datastore import (
    Datastore,
    EmbeddedDatastore,
    Filter,
    IdRanges,
    KeySegments,
    Metric,
    registry,
)
from knnstore.testing import DatastoreTests
from knnstore.testing.searching import FilterTests, SearchTests

GUIDE = Path(__file__).parents[2] / "docs" / "write-an-adapter.md"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Datastore]]:
    """The class of the page, found through the entry point of the page."""
    text = GUIDE.read_text()
    (source, *_), (project,) = (re.findall(f"```{kind}\n(.*?)```", text, re.S) for kind in ("python", "toml"))
    entry_point = re.search(r"^usearch = \"(.*)\"$", project, re.M)
    assert entry_point is not None
    site = tmp_path_factory.mktemp("site")
    (site / "knnstore_usearch.py").write_text(source)
    metadata = site / "knnstore_usearch-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: knnstore-usearch\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[knnstore.datastores]\nusearch = {entry_point[1]}\n")
    sys.path.insert(0, str(site))
    yield registry.load_adapter("usearch")
    sys.path.remove(str(site))
    del sys.modules["knnstore_usearch"]


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest, adapter: type[Datastore]) -> None:
    if request.cls is not None:
        request.cls.datastore_class = adapter


@pytest.mark.slow
class TestUsearch(DatastoreTests):
    """With its defaults."""


@pytest.mark.slow
class TestUsearchGraphs(SearchTests, FilterTests):
    params: ClassVar[dict[str, Any]] = {"exact_up_to": 0}


def test_graphs_find_nearly_all_and_always_k(adapter: type[Datastore], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(5000, 24)).astype(np.float16).astype(np.float32)
    queries = rng.normal(size=(20, 24)).astype(np.float32)
    distances = ((queries[:, None] - keys) ** 2).sum(-1)
    with adapter.open(tmp_path / "store", dim=24, exact_up_to=0) as store:
        store.add(np.arange(5000), keys, np.zeros(5000, np.int32))
        store.optimize()  # type: ignore[attr-defined]
        found = store.search(queries, 50)
        near = np.sort(distances, axis=1)[:, 49:50] * (1 + 1e-5)
        assert (found.distances <= near).mean() >= 0.95
        store.delete(IdRanges([(0, 2500)]))
        for where in (None, Filter(IdRanges([(2600, 2700)])), Filter(IdRanges([(2000, 4500)]))):
            found = store.search(queries, 100, where=where)
            assert found.ids.min() >= 2500
            if where is not None:
                assert where.ids.contains(found.ids).all()


def test_an_adapter_may_have_an_open_and_parameters_of_its_own(
    adapter: type[EmbeddedDatastore], tmp_path: Path
) -> None:
    class Opened(adapter):  # type: ignore[misc, valid-type]
        """Written when the base class had neither."""

        def __init__(self, segments: KeySegments, dim: int, metric: Metric, policy: dict[str, Any]) -> None:
            self._policy = policy
            super().__init__(segments, dim, metric)

        @classmethod
        def open(cls, location: Path, *, dim: int, metric: Metric = Metric.L2, mode: Any = "a", **given: Any):
            policy = super()._make_policy(given, dim, metric)
            return cls(KeySegments(location, dim, metric, mode), dim, metric, policy)

    keys = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    with Opened.open(tmp_path / "store", dim=8, exact_up_to=0) as store:
        store.add(np.arange(200), keys, np.zeros(200, np.int32))
        store.optimize()
        assert store.search(keys[:5], 1).ids[:, 0].tolist() == list(range(5))


def test_the_adapter_is_short() -> None:
    code = re.search("```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert code is not None
    assert code[1].count("\n") <= 100

"""Distances to codes by the compiled function and by FAISS, against numpy; and when Numba is not used."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from knnstore_cells.coded_cells import CellCodes, CodedCell, CompiledCells, FaissCells, load_kernels

from knnstore.datastore import Keys, Metric, ProductCodec
from knnstore.errors import InvalidVectorError

with_numba = pytest.mark.skipif(find_spec("numba") is None, reason="no Numba (the extra fast)")
with_faiss = pytest.mark.skipif(find_spec("faiss") is None, reason="no FAISS")
kinds = pytest.mark.parametrize(
    "create", [pytest.param("compiled", marks=with_numba), pytest.param("faiss", marks=with_faiss)]
)


class Case(NamedTuple):
    """Cells with codes, and queries that are compared with some of them."""

    codec: ProductCodec
    middle: Keys
    cells: list[CodedCell]
    queries: Keys
    probed: np.ndarray
    metric: Metric


@st.composite
def cases(draw: Callable) -> Case:
    """Cells of several sizes, some of them empty; queries that probe some of them, or no cell; equal keys."""
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 7, 130, 1100]), min_size=1, max_size=5))
    parts, queries = draw(st.sampled_from([1, 4, 8, 9, 32])), draw(st.integers(1, 20))
    width, metric = parts * draw(st.integers(1, 9)), draw(st.sampled_from(list(Metric)))
    shapes = (width, width), (256, width), (parts, 256, width // parts)
    codec = ProductCodec(*(random.normal(size=shape).astype(np.float16) for shape in shapes))
    ids = np.split(random.permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    # Few different values: several records have the same distance.
    codes = [random.choice([0, 1, 7, 255], (size, 1 + parts)).astype(np.uint8) for size in sizes]
    probed = np.stack([random.permutation(len(sizes)) for _ in range(queries)])
    probed = probed[:, : draw(st.integers(1, len(sizes)))].copy()
    probed[random.random(probed.shape) < draw(st.sampled_from([0.0, 0.3]))] = -1
    middle = random.normal(size=width).astype(np.float32) * (metric is Metric.L2)
    vectors = random.normal(size=(queries, width)).astype(np.float32)
    return Case(codec, middle, [*map(CodedCell, ids, codes)], vectors, probed, metric)


def decode(case: Case, codes: np.ndarray) -> Keys:
    """The keys minus the middle: a center, and an entry of the codebook of each part."""
    entries = case.codec.books[np.arange(len(case.codec.books)), codes[:, 1:]]
    return case.codec.centers[codes[:, 0]] + entries.reshape(len(codes), case.middle.size) - case.middle


def add_cells(codes: CellCodes, case: Case) -> None:
    """Add all cells, the last one first."""
    for number, cell in reversed([*enumerate(case.cells)]):
        codes.add_cell(number, cell, (decode(case, cell.codes) ** 2).sum(1))


def make(kind: str, case: Case) -> CellCodes:
    """Create an object with all cells of a case."""
    arguments = case.codec, case.middle, len(case.cells), case.metric
    codes = CompiledCells(load_kernels(), *arguments) if kind == "compiled" else FaissCells(*arguments)
    add_cells(codes, case)
    return codes


@kinds
@settings(max_examples=50)
@given(case=cases())
def test_distances_are_those_of_the_decoded_keys(create: str, case: Case) -> None:
    """In the order of the cells and records; records with equal codes are equally far; also after a reset."""
    codes = make(create, case)
    if len(case.queries) % 2:
        codes.clear()
        add_cells(codes, case)
    found = codes.measure(case.queries, case.probed)
    for query, of_query, ids, distances in zip(case.queries, case.probed, *found, strict=True):
        cells = [case.cells[number] for number in of_query if number >= 0]
        every = np.concatenate([case.cells[0].ids[:0], *(cell.ids for cell in cells)])
        stored = np.concatenate([case.cells[0].codes[:0], *(cell.codes for cell in cells)])
        keys = decode(case, stored).astype(np.float64)
        expected = ((keys - query) ** 2).sum(1) if case.metric is Metric.L2 else -keys @ query
        count = len(every)
        assert (ids[:count] == every).all()
        assert (ids[count:] == -1).all()
        assert (distances[count:] == np.inf).all()
        np.testing.assert_allclose(distances[:count], expected, rtol=1e-5, atol=1e-3)
        _, first, same = np.unique(stored, axis=0, return_index=True, return_inverse=True)
        assert (distances[:count] == distances[:count][first][same.ravel()]).all()


@kinds
@pytest.mark.parametrize("metric", list(Metric))
def test_a_query_that_is_too_large_is_refused(create: str, metric: Metric) -> None:
    random = np.random.default_rng(0)
    codec = ProductCodec(*(random.normal(size=s).astype(np.float16) for s in ((8, 8), (256, 8), (4, 256, 2))))
    cell = CodedCell(np.arange(9), random.integers(0, 255, (9, 5)).astype(np.uint8))
    queries = random.normal(size=(2, 8)).astype(np.float32)
    codes = make(
        create, Case(codec, np.zeros(8, np.float32), [cell], queries, np.zeros((2, 1), np.int64), metric)
    )
    assert np.isfinite(codes.measure(queries, np.zeros((2, 1), np.int64)).distances).all()
    with pytest.raises(InvalidVectorError, match="too large"), np.errstate(over="ignore", invalid="ignore"):
        codes.measure(queries * np.float32([[1], [1e38]]), np.zeros((2, 1), np.int64))


@with_numba
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["kept", None])
def test_numba_keeps_what_it_compiled_where_it_can(tmp_path: Path, folder: str | None) -> None:
    variables = {"NUMBA_CACHE_DIR": "", "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    if folder is not None:
        variables = {"NUMBA_CACHE_DIR": str(tmp_path / folder)}
    program = "from knnstore_cells import cpu_kernels; print(cpu_kernels.measure_codes.nopython_signatures)"
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert done.stdout.count("-> bool") == 1
    assert len([*tmp_path.rglob("*.nbc")]) == (folder is not None)


def test_numba_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KNNSTORE_NUMBA", "0")
    assert load_kernels.__wrapped__() is None
    assert not caplog.messages


@with_numba
def test_numba_that_does_not_work_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("knnstore_cells.cpu_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "knnstore_cells.cpu_kernels", None)  # its import fails
    assert load_kernels.__wrapped__() is None
    assert "Numba cannot be used for searches on the CPU: ModuleNotFoundError" in caplog.text

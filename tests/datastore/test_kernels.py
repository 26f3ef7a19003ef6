"""The search on a device with operations of torch, and with kernels in Triton's interpreter, against numpy.

The interpreter simulates the kernels on the CPU, one program after another. That shows what they compute, not
that they compile for a GPU, nor how fast they are.
"""

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from knnstore_cells import device_search
from knnstore_cells.device_records import Books, Found, Probed, Queries, Records, make_tables
from torch import Tensor

if not torch.cuda.is_available():  # with a GPU the kernels are compiled for it
    os.environ["TRITON_INTERPRET"] = "1"
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton (the extra gpu)")
SMALL = settings(max_examples=25)


class Case(NamedTuple):
    """Records, queries and the cells that these probe."""

    probed: Probed
    records: Records
    queries: Queries
    columns: int
    """Number of columns for each query; more than some of them need."""


@st.composite
def cases(draw: Callable, kind: str) -> Case:
    """Cells of several sizes, some of them empty; queries that probe some of them, or no cell; equal keys."""
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 130]), min_size=1, max_size=5))
    queries, probes = draw(st.integers(1, 20)), draw(st.integers(1, len(sizes)))
    parts = draw(st.sampled_from([1, 4, 6, 32, 64]))
    dim = parts * draw(st.integers(1, 3)) if kind == "codes" else draw(st.sampled_from([1, 16, 65, 100]))
    rows, is_l2 = sum(sizes), draw(st.booleans())
    middle = torch.from_numpy(random.normal(size=dim).astype(np.float32)) * is_l2
    # Few different values: several records have the same distance.
    if kind == "codes":
        books = Books(*(torch.from_numpy(random.normal(size=shape).astype(np.float32)) for shape in (
            (256, dim), (parts, 256, dim // parts)
        )))  # fmt: skip
        values = torch.from_numpy(random.choice([0, 1, 7, 255], (rows, 1 + parts)).astype(np.uint8))

        def decode(codes: Tensor) -> Tensor:
            chosen = books.books[torch.arange(parts), codes[..., 1:].long()]
            return chosen.flatten(-2) + books.centers[codes[..., 0].long()]

    else:
        books, decode = None, Tensor.float
        values = torch.from_numpy(random.integers(-3, 4, (rows, dim)).astype(np.float16))
    norms = (decode(values) - middle).square().sum(1) * is_l2
    tokens = torch.from_numpy(random.integers(0, 9, rows).astype(np.int32))
    starts, chosen = np.concatenate([[0], np.cumsum(sizes)]), None
    if draw(st.booleans()):  # only some of the records may be found
        mask = random.random(rows) < draw(st.sampled_from([0.0, 0.5]))
        chosen = np.flatnonzero(mask)
        starts = np.searchsorted(chosen, starts)
    width = int(np.diff(starts).max())
    assume(width)  # segments without a record to find are left out before
    cells = np.stack([random.permutation(len(sizes))[:probes] for _ in range(queries)])
    cells[random.random(cells.shape) < draw(st.sampled_from([0.0, 0.3]))] = -1
    vectors = torch.from_numpy(random.normal(size=(queries, dim)).astype(np.float32))
    records = Records(
        values, decode, middle, norms, tokens, torch.from_numpy(starts),
        None if chosen is None else torch.from_numpy(chosen), width, books,
    )  # fmt: skip
    squares = vectors.square().sum(1) * is_l2
    asked = Queries(vectors, squares, 2.0 if is_l2 else 1.0)
    # A cell has records of another segment before those of this one, and of a third after them.
    counts = np.diff(starts)[cells] * (cells >= 0)
    before, after = random.integers(0, 3, (2, *cells.shape))
    ends = np.cumsum(before + counts + after, 1)
    probed = Probed(torch.from_numpy(cells), torch.from_numpy(ends - after - counts))
    return Case(probed, records, asked, int(ends.max()) + draw(st.integers(0, 2)))


def nothing(case: Case) -> Found:
    """Distances and tokens before anything is filled in."""
    return Found.create(len(case.queries.vectors), case.columns, torch.device("cpu"))


def definition(case: Case) -> Found:
    """Every query with every record of its cells, in numpy and float64."""
    (cells, columns), records, queries, _ = case
    found = nothing(case)
    keys = (records.decode(records.values) - records.middle).double().numpy()
    for query, of_query in enumerate(cells.tolist()):
        for rank, cell in enumerate(of_query):
            if cell >= 0:
                rows = np.arange(*records.starts[cell : cell + 2].tolist())
                rows = rows if records.rows is None else records.rows.numpy()[rows]
                products = keys[rows] @ queries.vectors[query].double().numpy()
                distances = (keys[rows] ** 2).sum(1) * (queries.factor == 2) - queries.factor * products
                place = slice(int(columns[query, rank]), int(columns[query, rank]) + len(rows))
                found.distances[query, place] = torch.from_numpy(distances + float(queries.squares[query]))
                found.tokens[query, place] = records.tokens[rows]
    return found


def check(found: Found, case: Case) -> None:
    expected = definition(case)
    largest = np.abs(expected.distances[expected.distances < torch.inf].numpy()).max(initial=1)
    torch.testing.assert_close(found.distances, expected.distances, rtol=1e-5, atol=1e-5 * float(largest))
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("kind", ["codes", "keys"])
def test_distances_are_those_of_the_probed_records(kind: str) -> None:
    @SMALL
    @given(cases(kind))
    def compare(case: Case) -> None:
        found = nothing(case)
        device_search.measure_with_torch(*case[:3], found)
        check(found, case)

    compare()


@with_triton
@pytest.mark.parametrize("kind", ["codes", "keys"])
def test_kernels_measure_what_torch_measures(kind: str) -> None:
    from knnstore_cells import kernels

    @SMALL
    @given(cases(kind))
    def compare(case: Case) -> None:
        probed, records, queries, _ = case
        found = nothing(case)
        if kind == "codes":
            kernels.measure_codes(probed, records, make_tables(queries, records), queries, found)
        else:
            kernels.measure_keys(probed, records, queries, found)
        check(found, case)

    compare()


@st.composite
def sums(draw: Callable) -> tuple[Tensor, Tensor, Tensor, int]:
    """Distances, tokens, temperatures and the size of a vocabulary; some tokens are outside it."""
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    shape = draw(st.integers(1, 3)), draw(st.sampled_from([1, 511, 512, 700]))
    distances = random.integers(0, 50, shape).astype(np.float32) - draw(st.sampled_from([0.0, 1e4]))
    distances[random.random(shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = np.inf
    tokens = random.integers(0, 12, shape).astype(np.int32)
    temperatures = random.uniform(0.5, 40, (shape[0], draw(st.integers(1, 5)))).astype(np.float32)
    return *(torch.from_numpy(array) for array in (distances, tokens, temperatures)), draw(st.integers(1, 12))


@pytest.mark.parametrize("by", ["torch", pytest.param("triton", marks=with_triton)])
def test_sums_are_those_of_each_token(by: str) -> None:
    add_up = device_search.sum_with_torch
    if by == "triton":
        from knnstore_cells import kernels

        add_up = kernels.sum_by_token

    @SMALL
    @given(sums())
    def compare(case: tuple[Tensor, Tensor, Tensor, int]) -> None:
        distances, tokens, temperatures, vocabulary = case
        found = add_up(distances, tokens, distances.amin(1), temperatures, vocabulary)
        expected = np.zeros(found.shape)
        for query, row in enumerate(distances.double().numpy()):
            for number, temperature in enumerate(temperatures[query].tolist()):
                gaps = row.min() - row[row < np.inf] if (row < np.inf).any() else row[:0]
                places = tokens[query].numpy()[row < np.inf].clip(max=vocabulary - 1)
                np.add.at(expected[query, number], places, np.exp(gaps / temperature))
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)

    compare()


@with_triton
@pytest.mark.parametrize("wrong", [None, "measure_codes", "measure_keys", "sum_by_token"])
def test_kernels_that_compute_something_else_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str | None
) -> None:
    from knnstore_cells import kernels

    names = ("measure_codes", "measure_keys", "sum_by_token")
    functions = {name: getattr(kernels, name) for name in names}
    device = torch.device("cpu")
    assert device_search.verify_kernels(SimpleNamespace(**functions), device)
    if wrong is not None:
        functions[wrong] = lambda *_: torch.zeros(3, 2, 7)
        assert not device_search.verify_kernels(SimpleNamespace(**functions), device)
        monkeypatch.setattr(kernels, wrong, functions[wrong])
    with caplog.at_level(logging.WARNING):
        loaded = device_search._load_kernels(device)
    assert (loaded, "Triton's kernels cannot be used" in caplog.text) == (
        (kernels, False) if wrong is None else (None, True)
    )


@pytest.mark.parametrize("kind", ["codes", "keys"])
def test_a_kernel_that_fails_is_replaced_by_torch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """As a kernel that needs more shared memory for some shapes than the GPU has."""
    device, calls = torch.device("cpu"), []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        raise RuntimeError("out of resource: shared memory")

    failing = SimpleNamespace(measure_codes=fail, measure_keys=fail, sum_by_token=fail)

    @settings(SMALL, max_examples=5)
    @given(cases(kind))
    def compare(case: Case) -> None:
        caplog.clear()
        calls.clear()
        for _ in range(2):
            found = nothing(case)
            device_search.measure_distances(*case[:3], found)
            check(found, case)
            visits = device_search.DeviceVisits(*found, 8)
            temperatures = torch.full((len(found.distances), 1), 9.0)
            expected = device_search.sum_with_torch(*found, found.distances.amin(1), temperatures, 9)
            assert torch.equal(visits.sum_by_token(temperatures, 9), expected)
        assert (len(calls), len(caplog.messages)) == (1, 1)
        assert "out of resource: shared memory" in caplog.text
        device_search._kernels[device] = failing

    monkeypatch.setitem(device_search._kernels, device, failing)
    compare()


def test_an_error_of_torch_is_not_taken_for_one_of_a_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys of one byte for each component have no kernel; here torch lacks memory to decode them."""
    device, kernels, calls = torch.device("cpu"), SimpleNamespace(), []

    def decode(values: Tensor) -> Tensor:
        calls.append(values)
        raise RuntimeError("not enough memory")

    values, zeros, two = torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2), torch.tensor([0, 2])
    records = Records(values, decode, torch.zeros(4), zeros, zeros.int(), two, None, 2, None)
    probed = Probed(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
    monkeypatch.setitem(device_search._kernels, device, kernels)
    with pytest.raises(RuntimeError, match="not enough memory"):
        queries = Queries(torch.zeros(1, 4), torch.zeros(1), 2.0)
        device_search.measure_distances(probed, records, queries, Found.create(1, 2, device))
    assert device_search.get_kernels(device) is kernels
    assert (len(calls), caplog.messages) == (1, [])


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device_search.SWITCH, "0")
    assert device_search._load_kernels(torch.device("cpu")) is None
    assert device_search.get_kernels(torch.device("cpu")) is None

"""Cases of the conformance kit: visiting cells, which is optional."""

from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from knnstore.datastore import Datastore, Filter, IdRanges, Metric, SupportsCells, Visit, Visits, apart
from knnstore.errors import DimensionMismatchError, InvalidVectorError
from knnstore.testing.base import KitBase, Records, sample, some_queries, true_distances

ALL_CELLS = 1 << 16


class Celled(Datastore, SupportsCells, Protocol):
    """A datastore that has cells."""


def met(visits: list[Visits], records: Records, queries: int) -> NDArray[np.float32]:
    """The distance of each query to each record, shape (q, n); +inf where they did not meet."""
    found = np.full((queries, len(records)), np.inf, np.float32)
    column_of = {int(id): column for column, id in enumerate(records.ids)}
    for visit in apart(visits):
        shape = len(visit.queries), len(visit.ids)
        assert visit.distances.shape == shape, f"distances are {visit.distances.shape}, not {shape}"
        assert visit.distances.dtype == np.float32, f"distances are {visit.distances.dtype}, not float32"
        strays = [id for id in visit.ids.tolist() if id not in column_of]
        assert not strays, f"visited ids that are not live or not in the filter: {strays[:5]}"
        cell = np.ix_(visit.queries, np.array([column_of[id] for id in visit.ids.tolist()]))
        assert np.isinf(found[cell]).all(), "a query meets a record twice"
        found[cell] = visit.distances
    return found


class VisitTests(KitBase):
    """Needs: `add`, `delete`, `flush`."""

    @pytest.fixture
    def cells(self, metric: Metric, request: pytest.FixtureRequest) -> Celled:
        """The fixture `store`; an engine without cells is not opened for it."""
        if not hasattr(self.datastore_class, "visit"):
            pytest.skip("it has no visit, which is optional")
        store: Celled = request.getfixturevalue("store")
        return store

    @pytest.mark.parametrize("matching", [500, 30, 1])
    def test_all_cells_hold_all_that_matches(self, cells: Celled, records: Records, matching: int) -> None:
        """With as many probes as there are cells each query is measured against every record that matches.

        If this fails, check cells that no query is near to, and records that were added since.
        """
        queries, matched = some_queries(10, self.dim), records[:matching]
        visits = cells.visit(queries, ALL_CELLS, where=Filter(ids=matched.positions()))
        found, truth = met(visits, matched, 10), true_distances(queries, matched.keys, cells.metric)
        np.testing.assert_allclose(found, truth, 1e-4, 1e-3, err_msg="wrong distances")

    def test_ranks_are_those_of_the_nearest_cells(self, cells: Celled, records: Records) -> None:
        """Where ranks are told, the cells with a rank below p are those that p probes visit."""
        queries = some_queries(100, self.dim)
        visits = apart(cells.visit(queries, 4))
        for probes in (1, 3) if all(visit.ranks is not None for visit in visits) else ():
            nearer = [
                Visits.of(Visit(visit.queries[near], visit.ids, visit.distances[near]))
                for visit in visits
                for near in [np.asarray(visit.ranks) < probes]
            ]
            fewer = met(cells.visit(queries, probes), records, 100)
            np.testing.assert_allclose(met(nearer, records, 100), fewer, 1e-4, 1e-3, err_msg="wrong ranks")

    @pytest.mark.parametrize("groups", [(0,), (1, 3), (2, 77)])
    def test_by_groups(self, cells: Celled, records: Records, groups: tuple[int, ...]) -> None:
        """A filter of groups is honored, with all cells and with one; several groups share the probes.

        If this fails, check how the cells of several groups are compared.
        """
        where, queries = records.of_groups(*groups), some_queries(10, self.dim)
        matched = records.matching(where)
        for probes in (1, ALL_CELLS):
            found = met(cells.visit(queries, probes, where=where), matched, 10)
            assert np.isfinite(found).any(axis=1).all(), "a query visits nothing"
        assert np.isfinite(found).all(), "all cells do not hold all records of the groups"

    def test_more_probes_add_cells(self, cells: Celled, records: Records) -> None:
        """Each further probe adds records and takes none away; a query visits something with the first.

        If this fails, check that cells without a record that matches take no probe.
        """
        queries, where = some_queries(10, self.dim), Filter(ids=records[200:260].positions())
        former = np.zeros((10, 60), bool)
        for probes in range(1, 9):
            visits = cells.visit(queries, probes, where=where)
            found = np.isfinite(met(visits, records[200:260], 10))
            assert found.any(axis=1).all(), "a query visits nothing"
            assert (found | ~former).all(), "a further probe takes records away"
            former = found

    def test_what_is_gone_is_visited_no_more(self, cells: Celled, records: Records) -> None:
        """Deleted records are in no cell, replaced ones once, whether flushed or not; nothing is left of all.

        If this fails, check cells that are kept between visits.
        """
        queries = some_queries(5, self.dim)
        cells.visit(queries, ALL_CELLS)
        cells.delete(records[:100].positions())
        records[100:150].put(cells)
        for flushed in (False, True):
            if flushed:
                cells.flush()
            assert np.isfinite(met(cells.visit(queries, ALL_CELLS), records[100:], 5)).all()
        cells.delete(records.positions())
        assert cells.visit(queries, 4) == []

    def test_nothing_asked_and_nothing_there(self, cells: Celled) -> None:
        """No query visits nothing, nor does any where nothing matches.

        If this fails, check empty arrays.
        """
        assert met(cells.visit(some_queries(0, self.dim), 4), sample(0, self.dim), 0).size == 0
        assert cells.visit(some_queries(3, self.dim), 4, where=Filter(ids=IdRanges())) == []

    def test_bad_arguments(self, cells: Celled) -> None:
        """Queries are checked as in a search, and there is a probe at least.

        If this fails, call `checked_keys` and `checked_k`.
        """
        with pytest.raises(DimensionMismatchError):
            cells.visit(some_queries(3, self.dim + 1), 4)
        with pytest.raises(InvalidVectorError):
            cells.visit(np.full((1, self.dim), np.nan, np.float32), 4)
        with pytest.raises(ValueError, match="probes"):
            cells.visit(some_queries(3, self.dim), 0)

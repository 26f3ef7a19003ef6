"""Cases of the conformance kit: searching with a filter."""

import numpy as np
import pytest

from knnstore.datastore import Datastore, Filter, IdRanges, record_ids
from knnstore.testing.base import ALL_IDS, KitBase, Records, check_search, some_queries


class FilterTests(KitBase):
    """Needs: `add`, `search` without a filter."""

    @pytest.mark.parametrize("matching", [500, 250, 25, 1, 0])
    def test_by_ids(self, store: Datastore, records: Records, matching: int) -> None:
        """A filter of ids is honored, whether it lets everything, much, little or nothing through.

        If this fails with little, check that the engine's own filter does not run out of candidates;
        scanning a small set exactly is both right and fast.
        """
        check_search(store, records, 30, where=Filter(ids=records[:matching].positions()))

    @pytest.mark.parametrize("groups", [(0,), (1, 3), (0, 1, 2, 3), (77,), (2, 77)])
    def test_by_groups(self, store: Datastore, records: Records, groups: tuple[int, ...]) -> None:
        """A filter of groups is honored; groups that do not exist match nothing.

        If this fails, check unknown groups, and that several groups' results are merged by distance.
        """
        check_search(store, records, 10, where=records.of_groups(*groups))

    def test_both_names_give_the_same(self, store: Datastore, records: Records) -> None:
        """A filter that names groups and ids finds what its ids alone find.

        If this fails, check how groups are followed when records are added.
        """
        by_both = records.of_groups(1, 2)
        ours = store.search(some_queries(10, self.dim), 10, where=by_both)
        theirs = check_search(store, records, 10, where=Filter(ids=by_both.ids))
        if store.capabilities.exact_search:
            np.testing.assert_allclose(ours.distances, theirs.distances, rtol=1e-4, atol=1e-3)

    def test_filter_of_no_ids(self, store: Datastore, records: Records) -> None:
        """An empty filter matches nothing; it does not mean "no filter".

        If this fails, look for `if where.ids:` or `if where.groups:` where `is not None` is meant.
        """
        for where in (Filter(ids=IdRanges()), Filter(ids=IdRanges(), groups=frozenset())):
            check_search(store, records, 3, where=where)

    def test_filter_of_all_ids(self, store: Datastore, records: Records) -> None:
        """One range over all possible ids matches everything.

        If this fails, look for an array with one entry per id.
        """
        check_search(store, records, 10, where=Filter(ids=ALL_IDS))

    def test_all_but_one_document(self, store: Datastore, records: Records) -> None:
        """Leaving one document out, as scoring a stored document needs, leaves out only that.

        If this fails, check filters that let almost everything through.
        """
        where = Filter(ids=ALL_IDS - records[100:150].positions())
        check_search(store, records, 20, records.keys[100:110], where=where)

    def test_single_ids(self, store: Datastore, records: Records) -> None:
        """A filter names single records, not only whole positions or documents.

        If this fails, check the borders of half-open ranges.
        """
        check_search(store, records, 20, where=Filter(ids=IdRanges.of_ids(records.ids[::3])))

    def test_many_ranges(self, store: Datastore, records: Records) -> None:
        """Thousands of ranges, most of them without a record, are honored.

        If this fails, check the engine's limit on the length of a filter.
        """
        elsewhere = record_ids(200_000 + 2 * np.arange(2000), np.zeros(2000, np.int64))
        where = Filter(ids=IdRanges.of_ids(elsewhere) | IdRanges.of_ids(records.ids[1::2]))
        check_search(store, records, 20, where=where)

    def test_fewer_match_than_asked_for(self, store: Datastore, records: Records) -> None:
        """Where fewer than k match, all of them are found and the row is padded.

        If this fails, check that the search goes on until k are found or all were seen.
        """
        check_search(store, records, 20, where=Filter(ids=IdRanges.of_ids(records.ids[40:47])))
        check_search(store, records[:0], 4, where=Filter(ids=IdRanges([(1, 2)])))

    def test_deleted_and_moved_records_do_not_leak(self, store: Datastore, records: Records) -> None:
        """A filter finds neither what was deleted nor what moved to another group.

        If this fails, check that deletions and replacements reach the filtered path too.
        """
        store.delete(records[:50].positions())
        moved = Records(records.ids[200:250], records.keys[200:250], np.full(50, 1, np.int32))
        moved.put(store)
        now = records[50:200] + moved + records[250:]
        for group in (0, 1):
            check_search(store, now, 60, records.keys[190:210], where=now.of_groups(group))

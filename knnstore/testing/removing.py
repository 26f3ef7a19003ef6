"""Cases of the conformance kit: deleting and iterating."""

from pathlib import Path

import numpy as np
import pytest

from knnstore.datastore import Datastore, IdRanges, MemoryDatastore, Metric, SupportsVacuum
from knnstore.errors import RecordNotFoundError
from knnstore.testing.base import (
    ALL_IDS,
    KitBase,
    OpenStore,
    Records,
    check_holds,
    check_search,
    contents,
    half,
    require_get,
    require_persistent,
    sample,
    some_queries,
)


class RemoveAndIterateTests(KitBase):
    """Needs: `add`, `count`, `search`."""

    def test_deleted_records_are_gone(self, store: Datastore, records: Records) -> None:
        """Deleting documents removes exactly their records, from every method.

        If this fails, check the borders of half-open ranges.
        """
        gone = np.zeros(len(records), bool)
        gone[50:100] = gone[300:320] = True
        store.delete(records[gone].positions())
        check_holds(store, records[~gone])
        check_search(store, records[~gone], 10, records.keys[45:105])

    def test_deleting_single_ids(self, store: Datastore, records: Records) -> None:
        """Ids next to a deleted one stay.

        If this fails, check the borders of half-open ranges.
        """
        store.delete(IdRanges.of_ids(records.ids[::2]))
        check_holds(store, records[1::2])

    def test_deleting_again_removes_nothing(self, store: Datastore, records: Records) -> None:
        """Deleting is idempotent.

        If this fails, check that rows already deleted are not counted again.
        """
        for _ in range(2):
            store.delete(records[:60].positions())
        check_holds(store, records[60:])

    def test_deleting_what_is_not_there(self, store: Datastore, records: Records) -> None:
        """Unknown ids and empty sets are ignored.

        If this fails, check what the engine does with ids that it does not know.
        """
        store.delete(IdRanges([(0, 5), (2**61, 2**62)]))
        store.delete(IdRanges())
        check_holds(store, records)

    def test_deleted_ids_can_be_added_again(self, store: Datastore, records: Records) -> None:
        """A deleted id is free: added with another key, it has that key alone.

        If this fails, check that a tombstone ends when its id is added again.
        """
        store.delete(records[:100].positions())
        again = Records(records.ids[:100], half(records.keys[:100] * 2), records.groups[:100])
        again.put(store)
        check_holds(store, again + records[100:])
        check_search(store, again + records[100:], 20)

    def test_emptied_store_can_be_filled_again(self, store: Datastore, records: Records) -> None:
        """After deleting everything the store is like a new one.

        If this fails, check indexes and groups that have become empty.
        """
        store.delete(ALL_IDS)
        for now in (records[:0], records[:30]):
            now.put(store)
            check_holds(store, now)
            check_search(store, now, 5)

    def test_getting_keys(self, store: Datastore, records: Records) -> None:
        """`get` gives the keys of any records in the order asked for, as they are now.

        If this fails, check the order of the answer, and that replaced and deleted rows are left out.
        """
        getting = require_get(store)
        asked = np.array([7, 3, 499, 250, 7])
        found = getting.get(records.ids[asked])
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, records.keys[asked])
        assert getting.get(records.ids[:0]).shape == (0, self.dim)
        Records(records.ids[3:4], records.keys[3:4] * 2, records.groups[3:4] + 1).put(store)
        np.testing.assert_array_equal(getting.get(records.ids[3:5]), records.keys[3:5] * [[2], [1]])

    def test_getting_what_is_not_there(self, store: Datastore, records: Records) -> None:
        """`get` names an id that is unknown, missing (-1) or deleted.

        If this fails, check that each id asked for is compared with the one found.
        """
        getting = require_get(store)
        store.delete(IdRanges.of_ids(records.ids[5:6]))
        for id in (records.ids[0] + 1, -1, records.ids[5]):
            with pytest.raises(RecordNotFoundError, match=str(id)):
                getting.get(np.array([records.ids[9], id]))

    def test_vacuum_leaves_no_byte_of_what_was_deleted(
        self, open_store: OpenStore, location: str | Path
    ) -> None:
        """After `vacuum` no file has an id or a key of a deleted or replaced record; the others are there.

        If this fails, check that every file with a deleted row is written anew, indexes and logs too.
        """
        records = sample(500, self.dim, first_position=0x5A_3C7E_19D2)  # ids like no other number
        with require_persistent(open_store()) as store:
            if not isinstance(store, SupportsVacuum):
                pytest.skip("it has no vacuum, which is optional")
            records.put(store)
            store.flush()
            store.delete(records[100:200].positions())
            replaced = Records(records.ids[:10], half(records.keys[:10] * 2), records.groups[:10])
            replaced.put(store)
            store.vacuum()
            check_holds(store, replaced + records[10:100] + records[200:])
        if isinstance(location, Path):
            bytes_of = {path: path.read_bytes() for path in location.rglob("*") if path.is_file()}
            gone = [id.tobytes() for id in records.ids[100:200]]
            for keys in (records.keys[100:200], records.keys[:10]):
                gone += [key.tobytes() for key in (*keys, *keys.astype(np.float16))]
            assert not [path for path, content in bytes_of.items() if any(one in content for one in gone)]

    @pytest.mark.parametrize("batch_size", [1, 7, 250, 500, 10_000])
    def test_iterating_in_batches(self, store: Datastore, records: Records, batch_size: int) -> None:
        """Any batch size gives every record once, by ascending id, in batches none too large or empty.

        If this fails, check the last batch, and the order over several segments of the store.
        """
        part = records[:100] if batch_size == 1 else records
        store.delete(ALL_IDS - part.positions())
        batches = list(store.iterate(batch_size=batch_size))
        sizes = [len(ids) for ids, _, _ in batches]
        assert 1 <= min(sizes) <= max(sizes) <= batch_size
        for ids, keys, groups in batches:
            assert [str(array.dtype) for array in (ids, keys, groups)] == ["int64", "float32", "int32"]
            assert keys.shape == (len(ids), self.dim)
            assert groups.shape == ids.shape
        np.testing.assert_array_equal(np.concatenate([ids for ids, _, _ in batches]), part.ids)

    def test_batch_size_below_one_is_refused(self, store: Datastore) -> None:
        """A batch holds at least one record.

        If this fails, check batch_size before the first batch is made.
        """
        with pytest.raises(ValueError):  # noqa: PT011  # its text is the adapter's own
            list(store.iterate(batch_size=0))

    def test_iterating_over_some_ids(self, store: Datastore, records: Records) -> None:
        """`iterate` takes only records in the ranges; none for an empty set.

        If this fails, look for `if ids:` where `ids is not None` is meant.
        """
        chosen = records[130:170] + records[400:401]
        held = contents(store, ids=chosen.positions() | IdRanges([(2**61, 2**62)]), batch_size=16)
        np.testing.assert_array_equal(held.ids, chosen.ids)
        np.testing.assert_array_equal(held.keys, chosen.keys)
        np.testing.assert_array_equal(held.groups, chosen.groups)
        assert len(contents(store, ids=IdRanges())) == 0

    def test_what_iterate_yields_is_the_caller_s(self, store: Datastore, records: Records) -> None:
        """Changing a yielded array does not change the store.

        If this fails, copy before yielding, or yield arrays that cannot be written to.
        """
        for batch in store.iterate(batch_size=200):
            for array in batch:
                if array.flags.writeable:
                    array[...] = 0
        check_holds(store, records)

    def test_contents_can_be_moved(self, store: Datastore, records: Records, metric: Metric) -> None:
        """What `iterate` yields can be added to another store, and from there to this one again.

        If this fails, check the dtypes and shapes of what is yielded.
        """
        other = MemoryDatastore.open("", dim=self.dim, metric=metric)
        for batch in store.iterate(batch_size=64):
            other.add(*batch)
        check_search(other, records, 10)
        store.delete(ALL_IDS)
        for batch in other.iterate(batch_size=100):
            store.add(*batch)
        check_holds(store, records)

    def test_keys_are_as_exact_as_promised(self, open_store: OpenStore, records: Records) -> None:
        """Keys come back bit for bit if `capabilities.exact_keys`, else rounded to half precision.

        If this fails, check the capability, and how keys are rounded.
        """
        keys = some_queries(len(records), self.dim)
        store = Records(records.ids, keys, records.groups).put(open_store())
        expected = keys if store.capabilities.exact_keys else half(keys)
        np.testing.assert_array_equal(contents(store).keys, expected)

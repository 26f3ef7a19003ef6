"""Cases of the conformance kit: adding and replacing records."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

from knnstore.datastore import (
    Datastore,
    Groups,
    IdRanges,
    MemoryDatastore,
    Metric,
    SupportsUploads,
    SupportsVacuum,
)
from knnstore.errors import DimensionMismatchError, InvalidVectorError, RecordNotFoundError
from knnstore.testing.base import (
    ALL_IDS,
    KitBase,
    OpenStore,
    Records,
    check_holds,
    check_search,
    make_queries,
    make_records,
    read_contents,
    require_get,
    require_persistent,
    round_to_half,
)


class AddTests(KitBase):
    """Cases of the kit for adding and replacing records; they use `count`, `iterate` and `search`."""

    def test_added_records_are_there(self, store: Datastore, records: Records) -> None:
        """Added records are counted, iterated over and found before any flush.

        If this fails, check that records not yet flushed take part in `search` and `iterate`.
        """
        check_holds(store, records)
        neighbors = store.search(records.keys[:5], len(records))
        assert set(records.ids[:5].tolist()) <= set(neighbors.ids.ravel().tolist())

    def test_order_of_ids_does_not_matter(self, open_store: OpenStore, records: Records) -> None:
        """Ids may come in any order, within one call of `add` and over several calls.

        If this fails, check that keys and groups are sorted along with the ids.
        """
        shuffled = records[np.random.default_rng(5).permutation(len(records))]
        store = shuffled[:200].add_to(open_store())
        shuffled[200:].add_to(store)
        check_holds(store, records)

    def test_adding_again_replaces_the_key(self, open_store: OpenStore, records: Records) -> None:
        """Adding an id again replaces the record's key; the old key is never found again.

        If this fails, check that the engine's own insert replaces instead of storing a second row.
        """
        store = records.add_to(open_store())
        changed = Records(records.ids[:100], round_to_half(records.keys[:100] + 64), records.groups[:100])
        changed.add_to(store)
        check_holds(store, changed + records[100:])
        assert store.search(changed.keys, 3).ids[:, 0].tolist() == changed.ids.tolist()
        old_places = store.search(records.keys[:100], 5).ids
        assert not np.isin(old_places, changed.ids).any(), "a replaced key is still found"

    def test_adding_again_moves_to_the_new_group(self, open_store: OpenStore, records: Records) -> None:
        """Adding an id again with another group moves the record to that group.

        If this fails, check that the old row is removed from the index of its old group.
        """
        store = records.add_to(open_store())
        moved = records[records.groups == 0]
        Records(moved.ids, moved.keys, np.full(len(moved), 9, np.int32)).add_to(store)
        groups = np.where(records.groups == 0, 9, records.groups).astype(np.int32)
        expected = Records(records.ids, records.keys, groups)
        check_holds(store, expected)
        neighbors = store.search(moved.keys[:3], len(records), where=expected.filter_by_groups(9))
        assert set(neighbors.ids[neighbors.ids >= 0].tolist()) <= set(moved.ids.tolist())
        assert neighbors.ids[:, 0].tolist() == moved.ids[:3].tolist()

    def test_an_upload_adds_and_changes_nothing(self, open_store: OpenStore, records: Records) -> None:
        """An upload stores the records that are not in the store yet, and leaves stored records unchanged.

        `count_uploaded` returns the number of records that the upload with this name has stored, within some
        ids and one group. Records that were replaced or deleted since do not count.

        If this fails, check that the engine's insert leaves existing rows alone, as one statement, and that
        `add` replaces a row with the name of its upload.
        """
        store = open_store()
        if not (isinstance(store, SupportsUploads) and store.takes_uploads):
            pytest.skip(
                "the adapter accepts no uploads, which is optional: the commit of a plan adds all keys"
            )
        other = Records(records.ids, round_to_half(records.keys + 64), records.groups + 1)
        records[:100].add_to(store)
        for name, part in (("first", other[:300]), ("second", records[200:]), ("first", other[:300])):
            store.upload(part.ids, part.keys, part.groups, name)
        expected = records[:100] + other[100:300] + records[300:]
        check_holds(store, expected)
        check_search(store, expected, 10)

        def count(name: str, groups: Groups, ids: IdRanges = ALL_IDS) -> list[int]:
            """Count the records of an upload in each of some groups."""
            return [store.count_uploaded(ids, name, group) for group in np.unique(groups).tolist()]

        assert count("first", other.groups) == np.bincount(other.groups[100:300])[1:].tolist()
        assert count("second", records.groups) == np.bincount(records.groups[300:]).tolist()
        assert sum(count("first", other.groups, other[50:150].cover_positions())) == 50
        assert count("third", other.groups) == [0, 0, 0, 0]
        records[100:110].add_to(store)
        store.delete(other[110:150].cover_positions())
        assert sum(count("first", other.groups)) == 150
        check_holds(store, records[:110] + other[150:300] + records[300:])

    def test_adding_the_same_again_changes_nothing(self, store: Datastore, records: Records) -> None:
        """Repeating an `add`, as after a crash, changes nothing.

        If this fails, check that an equal record replaces the stored record.
        """
        records.add_to(store)
        records[50:150].add_to(store)
        check_holds(store, records)

    @pytest.mark.parametrize("many", [1, 7, 100])
    def test_batches_do_not_matter(self, open_store: OpenStore, records: Records, many: int) -> None:
        """One large call of `add` and many small calls give the same store.

        If this fails, check what happens to a batch of one record.
        """
        store = open_store()
        part = records[:120]
        for start in range(0, len(part), many):
            part[start : start + many].add_to(store)
        check_holds(store, part)

    def test_empty_call_does_nothing(self, open_store: OpenStore, records: Records) -> None:
        """Adding no records is allowed, on an empty store too.

        If this fails, check for operations that need at least one row.
        """
        store = records[:0].add_to(open_store())
        assert store.count() == 0
        records.add_to(store)
        records[:0].add_to(store)
        check_holds(store, records)

    def test_ids_survive_whole(self, open_store: OpenStore) -> None:
        """Ids of up to 63 bits come back unchanged.

        If this fails, look for a conversion to float64 (exact up to 2**53) or to a 32-bit integer.
        """
        ids = np.array([0, 1, 2**31, 2**32 + 1, 2**53 + 1, 2**62 + 5, 2**63 - 2])
        template = make_records(len(ids), self.dim)
        records = Records(ids, template.keys, template.groups)
        store = records.add_to(open_store())
        check_holds(store, records)
        assert store.search(records.keys, 1).ids[:, 0].tolist() == ids.tolist()
        store.delete(IdRanges.from_ids(ids[-2:]))
        check_holds(store, records[:-2])

    def test_groups_use_all_31_bits(self, open_store: OpenStore) -> None:
        """Groups come back unchanged, also the largest possible group.

        If this fails, look for a narrower integer type, or for an array with one entry per possible group.
        """
        template = make_records(4, self.dim)
        records = Records(template.ids, template.keys, np.array([0, 1, 70_000, 2**31 - 1], np.int32))
        store = records.add_to(open_store())
        check_holds(store, records)
        neighbors = store.search(template.keys[:1], 4, where=records.filter_by_groups(2**31 - 1))
        assert neighbors.ids[0].tolist() == [records.ids[3], -1, -1, -1]

    def test_arguments_are_neither_kept_nor_changed(self, open_store: OpenStore, records: Records) -> None:
        """The caller may reuse its buffers after `add`.

        If this fails, check that arrays that needed no cast are copied.
        """
        buffer = Records(records.ids.copy(), records.keys.copy(), records.groups.copy())
        store = buffer.add_to(open_store())
        np.testing.assert_array_equal(buffer.keys, records.keys)
        np.testing.assert_array_equal(buffer.ids, records.ids)
        np.testing.assert_array_equal(buffer.groups, records.groups)
        buffer.ids[:], buffer.keys[:], buffer.groups[:] = 1, 0, 1
        check_holds(store, records)

    @pytest.mark.parametrize("form", ["float16", "float64", "column order", "strided", "read-only", "list"])
    def test_other_forms_of_keys_are_cast(self, open_store: OpenStore, records: Records, form: str) -> None:
        """Keys may have another float type or memory layout, or be read-only.

        If this fails, check that `add` begins with `validate_records`.
        """
        wide = np.repeat(records.keys, 2, axis=1)
        keys: ArrayLike = {
            "float16": records.keys.astype(np.float16),
            "float64": records.keys.astype(np.float64),
            "column order": np.asfortranarray(records.keys),
            "strided": wide[:, ::2],
            "read-only": np.frombuffer(records.keys.tobytes(), np.float32).reshape(records.keys.shape),
            "list": records.keys.tolist(),
        }[form]
        store = open_store()
        store.add(records.ids, keys, records.groups)  # type: ignore[arg-type]  # casting is the case
        check_holds(store, records)

    def test_id_twice_in_one_call_is_refused(self, store: Datastore, records: Records) -> None:
        """A call with the same id twice is refused; none of its records is stored.

        If this fails, check that `add` begins with `validate_records`.
        """
        with _expect_refusal(ValueError, store, records):
            store.add(np.array([5, 6, 5]), records.keys[:3], records.groups[:3])

    def test_wrong_dim_is_refused(self, store: Datastore, records: Records) -> None:
        """Keys of another dim raise; nothing is stored.

        If this fails, check that `add` begins with `validate_records`.
        """
        with _expect_refusal(DimensionMismatchError, store, records):
            store.add(records.ids[:3], records.keys[:3, :-1], records.groups[:3])

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_key_that_is_not_finite_is_refused(
        self, store: Datastore, records: Records, value: float
    ) -> None:
        """NaN and infinities raise; nothing is stored, not even the good rows of the call.

        If this fails, check that `add` begins with `validate_records`.
        """
        keys = records.keys[:3] * 2
        keys[1, 2] = value
        with _expect_refusal(InvalidVectorError, store, records):
            store.add(records.ids[:3], keys, records.groups[:3])

    @pytest.mark.parametrize(
        "wrong", ["one axis", "fewer ids", "fewer groups", "negative id", "negative group"]
    )
    def test_arguments_that_do_not_fit_are_refused(
        self, store: Datastore, records: Records, wrong: str
    ) -> None:
        """Arrays of the wrong shape and negative numbers raise `ValueError`; nothing is stored.

        If this fails, check that `add` begins with `validate_records`.
        """
        ids, keys, groups = np.arange(3), records.keys[:3] * 2, np.zeros(3, np.int32)
        changes = {
            "one axis": (ids, keys[0], groups),
            "fewer ids": (ids[:2], keys, groups),
            "fewer groups": (ids, keys, groups[:2]),
            "negative id": (ids - 1, keys, groups),
            "negative group": (ids, keys, groups - 1),
        }
        with _expect_refusal(ValueError, store, records):
            store.add(*changes[wrong])

    def test_great_key_is_kept_or_refused(self, store: Datastore, records: Records) -> None:
        """A finite key beyond half precision (65504) is kept or refused; it never becomes infinite.

        If this fails, check the range of keys before they are rounded to half precision.
        """
        record = Records(np.array([1]), np.full((1, self.dim), 100_000, np.float32), np.array([0], np.int32))
        try:
            record.add_to(store)
        except InvalidVectorError:
            check_holds(store, records)
        else:
            check_holds(store, record + records)


@contextmanager
def _expect_refusal(error: type[Exception], store: Datastore, records: Records) -> Iterator[None]:
    """Check that the ``with`` block raises an error, and that the store is unchanged afterwards.

    Args:
        error: class of the error that the block must raise.
        store: the store that the block tries to change.
        records: the records that the store has before the block, and must have afterwards.

    Raises:
        AssertionError: the store has other records. pytest fails the test if the block raises no such error.
    """
    with pytest.raises(error):
        yield
    check_holds(store, records)


class RemoveAndIterateTests(KitBase):
    """Cases of the kit for deleting, reading and iterating; they use `add`, `count` and `search`."""

    def test_deleted_records_are_gone(self, store: Datastore, records: Records) -> None:
        """Deleting the ids of documents removes exactly their records from the results of all methods.

        If this fails, check the borders of half-open ranges.
        """
        is_deleted = np.zeros(len(records), bool)
        is_deleted[50:100] = is_deleted[300:320] = True
        store.delete(records[is_deleted].cover_positions())
        check_holds(store, records[~is_deleted])
        check_search(store, records[~is_deleted], 10, records.keys[45:105])

    def test_deleting_single_ids(self, store: Datastore, records: Records) -> None:
        """Ids next to a deleted id stay.

        If this fails, check the borders of half-open ranges.
        """
        store.delete(IdRanges.from_ids(records.ids[::2]))
        check_holds(store, records[1::2])

    def test_deleting_again_removes_nothing(self, store: Datastore, records: Records) -> None:
        """Deleting is idempotent.

        If this fails, check that rows already deleted are not counted again.
        """
        for _ in range(2):
            store.delete(records[:60].cover_positions())
        check_holds(store, records[60:])

    def test_deleting_what_is_not_there(self, store: Datastore, records: Records) -> None:
        """Deleting unknown ids or an empty set changes nothing.

        If this fails, check what the engine does with ids that it does not know.
        """
        store.delete(IdRanges([(0, 5), (2**61, 2**62)]))
        store.delete(IdRanges())
        check_holds(store, records)

    def test_deleted_ids_can_be_added_again(self, store: Datastore, records: Records) -> None:
        """A deleted id can be added again; the record has only the new key.

        If this fails, check that a tombstone ends when its id is added again.
        """
        store.delete(records[:100].cover_positions())
        again = Records(records.ids[:100], round_to_half(records.keys[:100] * 2), records.groups[:100])
        again.add_to(store)
        check_holds(store, again + records[100:])
        check_search(store, again + records[100:], 20)

    def test_emptied_store_can_be_filled_again(self, store: Datastore, records: Records) -> None:
        """After all records are deleted, the store works like a new store.

        If this fails, check indexes and groups that have become empty.
        """
        store.delete(ALL_IDS)
        for expected in (records[:0], records[:30]):
            expected.add_to(store)
            check_holds(store, expected)
            check_search(store, expected, 5)

    def test_getting_keys(self, store: Datastore, records: Records) -> None:
        """`get` returns the present keys of any records, in the order of the ids.

        If this fails, check the order of the result, and that replaced and deleted rows are left out.
        """
        readable = require_get(store)
        rows = np.array([7, 3, 499, 250, 7])
        keys = readable.get(records.ids[rows])
        assert keys.dtype == np.float32
        np.testing.assert_array_equal(keys, records.keys[rows])
        assert readable.get(records.ids[:0]).shape == (0, self.dim)
        Records(records.ids[3:4], records.keys[3:4] * 2, records.groups[3:4] + 1).add_to(store)
        np.testing.assert_array_equal(readable.get(records.ids[3:5]), records.keys[3:5] * [[2], [1]])

    def test_getting_what_is_not_there(self, store: Datastore, records: Records) -> None:
        """`get` raises an error that names an id that is unknown, missing (-1) or deleted.

        If this fails, check that each requested id is compared with the id of the record that was found.
        """
        readable = require_get(store)
        store.delete(IdRanges.from_ids(records.ids[5:6]))
        for id in (records.ids[0] + 1, -1, records.ids[5]):
            with pytest.raises(RecordNotFoundError, match=str(id)):
                readable.get(np.array([records.ids[9], id]))

    def test_vacuum_leaves_no_byte_of_what_was_deleted(
        self, open_store: OpenStore, location: str | Path
    ) -> None:
        """After `vacuum` no file has an id or a key of a deleted or replaced record; other records stay.

        If this fails, check that every file with a deleted row is rewritten, also indexes and logs.
        """
        records = make_records(500, self.dim, first_position=0x5A_3C7E_19D2)  # ids like no other number
        with require_persistent(open_store()) as store:
            if not isinstance(store, SupportsVacuum):
                pytest.skip("the adapter has no vacuum, which is optional")
            records.add_to(store)
            store.flush()
            store.delete(records[100:200].cover_positions())
            replaced = Records(records.ids[:10], round_to_half(records.keys[:10] * 2), records.groups[:10])
            replaced.add_to(store)
            store.vacuum()
            check_holds(store, replaced + records[10:100] + records[200:])
        if isinstance(location, Path):
            bytes_of = {path: path.read_bytes() for path in location.rglob("*") if path.is_file()}
            deleted_bytes = [id.tobytes() for id in records.ids[100:200]]
            for keys in (records.keys[100:200], records.keys[:10]):
                deleted_bytes += [key.tobytes() for key in (*keys, *keys.astype(np.float16))]
            assert not [
                path for path, content in bytes_of.items() if any(value in content for value in deleted_bytes)
            ]

    @pytest.mark.parametrize("batch_size", [1, 7, 250, 500, 10_000])
    def test_iterating_in_batches(self, store: Datastore, records: Records, batch_size: int) -> None:
        """With any batch size, every record is yielded once, by ascending id; no batch is too large or empty.

        If this fails, check the last batch, and the order over several segments of the store.
        """
        part = records[:100] if batch_size == 1 else records
        store.delete(ALL_IDS - part.cover_positions())
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
        """`iterate` yields only records with ids in the ranges, and nothing for an empty set.

        If this fails, look for `if ids:` in place of `if ids is not None`.
        """
        selected = records[130:170] + records[400:401]
        iterated = read_contents(
            store, ids=selected.cover_positions() | IdRanges([(2**61, 2**62)]), batch_size=16
        )
        np.testing.assert_array_equal(iterated.ids, selected.ids)
        np.testing.assert_array_equal(iterated.keys, selected.keys)
        np.testing.assert_array_equal(iterated.groups, selected.groups)
        assert len(read_contents(store, ids=IdRanges())) == 0

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
        """The batches of `iterate` can be added to another store, and from there to this store again.

        If this fails, check the dtypes and shapes of the yielded arrays.
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
        """Keys come back bit for bit if `capabilities.exact_keys` is True, else rounded to half precision.

        If this fails, check the capability and the rounding of keys.
        """
        keys = make_queries(len(records), self.dim)
        store = Records(records.ids, keys, records.groups).add_to(open_store())
        expected = keys if store.capabilities.exact_keys else round_to_half(keys)
        np.testing.assert_array_equal(read_contents(store).keys, expected)

"""Cases of the conformance kit: adding and replacing records."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import ArrayLike

from knnstore.datastore import Datastore, IdRanges
from knnstore.errors import DimensionMismatchError, InvalidVectorError
from knnstore.testing.base import KitBase, OpenStore, Records, check_holds, half, sample


class AddTests(KitBase):
    """Needs: `open`, `count`, `iterate`, `search`."""

    def test_added_records_are_there(self, store: Datastore, records: Records) -> None:
        """What was added is counted, iterated over and found, before any flush.

        If this fails, check that records not yet flushed take part in `search` and `iterate`.
        """
        check_holds(store, records)
        found = store.search(records.keys[:5], len(records))
        assert set(records.ids[:5].tolist()) <= set(found.ids.ravel().tolist())

    def test_order_of_ids_does_not_matter(self, open_store: OpenStore, records: Records) -> None:
        """Ids may come in any order, within a call and over several.

        If this fails, check that keys and groups are sorted along with the ids.
        """
        shuffled = records[np.random.default_rng(5).permutation(len(records))]
        store = shuffled[:200].put(open_store())
        shuffled[200:].put(store)
        check_holds(store, records)

    def test_adding_again_replaces_the_key(self, open_store: OpenStore, records: Records) -> None:
        """A present id gets the new key; the old one is never found again.

        If this fails, check that the engine's own insert replaces instead of storing a second row.
        """
        store = records.put(open_store())
        changed = Records(records.ids[:100], half(records.keys[:100] + 64), records.groups[:100])
        changed.put(store)
        check_holds(store, changed + records[100:])
        assert store.search(changed.keys, 3).ids[:, 0].tolist() == changed.ids.tolist()
        old_places = store.search(records.keys[:100], 5).ids
        assert not np.isin(old_places, changed.ids).any(), "a replaced key is still found"

    def test_adding_again_moves_to_the_new_group(self, open_store: OpenStore, records: Records) -> None:
        """A present id that is added with another group leaves the old one.

        If this fails, check that the old row is removed from the index of its old group.
        """
        store = records.put(open_store())
        moved = records[records.groups == 0]
        Records(moved.ids, moved.keys, np.full(len(moved), 9, np.int32)).put(store)
        groups = np.where(records.groups == 0, 9, records.groups).astype(np.int32)
        now = Records(records.ids, records.keys, groups)
        check_holds(store, now)
        found = store.search(moved.keys[:3], len(records), where=now.of_groups(9))
        assert set(found.ids[found.ids >= 0].tolist()) <= set(moved.ids.tolist())
        assert found.ids[:, 0].tolist() == moved.ids[:3].tolist()

    def test_adding_the_same_again_changes_nothing(self, store: Datastore, records: Records) -> None:
        """Replaying an `add` after a crash is harmless.

        If this fails, check the upsert once more.
        """
        records.put(store)
        records[50:150].put(store)
        check_holds(store, records)

    @pytest.mark.parametrize("many", [1, 7, 100])
    def test_batches_do_not_matter(self, open_store: OpenStore, records: Records, many: int) -> None:
        """One call or many small ones give the same store.

        If this fails, check what happens to a batch of one record.
        """
        store = open_store()
        part = records[:120]
        for start in range(0, len(part), many):
            part[start : start + many].put(store)
        check_holds(store, part)

    def test_empty_call_does_nothing(self, open_store: OpenStore, records: Records) -> None:
        """Adding no records is allowed, on an empty store too.

        If this fails, check for operations that need at least one row.
        """
        store = records[:0].put(open_store())
        assert store.count() == 0
        records.put(store)
        records[:0].put(store)
        check_holds(store, records)

    def test_ids_survive_whole(self, open_store: OpenStore) -> None:
        """Ids use all 63 bits and come back unchanged.

        If this fails, look for a float64 (exact up to 2**53) or a 32-bit integer on the way.
        """
        ids = np.array([0, 1, 2**31, 2**32 + 1, 2**53 + 1, 2**62 + 5, 2**63 - 2])
        some = sample(len(ids), self.dim)
        records = Records(ids, some.keys, some.groups)
        store = records.put(open_store())
        check_holds(store, records)
        assert store.search(records.keys, 1).ids[:, 0].tolist() == ids.tolist()
        store.delete(IdRanges.of_ids(ids[-2:]))
        check_holds(store, records[:-2])

    def test_groups_use_all_31_bits(self, open_store: OpenStore) -> None:
        """Groups come back unchanged, the greatest too.

        If this fails, look for a narrower integer or for an array with one entry per possible group.
        """
        some = sample(4, self.dim)
        records = Records(some.ids, some.keys, np.array([0, 1, 70_000, 2**31 - 1], np.int32))
        store = records.put(open_store())
        check_holds(store, records)
        found = store.search(some.keys[:1], 4, where=records.of_groups(2**31 - 1))
        assert found.ids[0].tolist() == [records.ids[3], -1, -1, -1]

    def test_arguments_are_neither_kept_nor_changed(self, open_store: OpenStore, records: Records) -> None:
        """The caller may reuse its buffers after `add`.

        If this fails, check that arrays that needed no cast are copied.
        """
        buffer = Records(records.ids.copy(), records.keys.copy(), records.groups.copy())
        store = buffer.put(open_store())
        np.testing.assert_array_equal(buffer.keys, records.keys)
        np.testing.assert_array_equal(buffer.ids, records.ids)
        np.testing.assert_array_equal(buffer.groups, records.groups)
        buffer.ids[:], buffer.keys[:], buffer.groups[:] = 1, 0, 1
        check_holds(store, records)

    @pytest.mark.parametrize("form", ["float16", "float64", "column order", "strided", "read-only", "list"])
    def test_other_forms_of_keys_are_cast(self, open_store: OpenStore, records: Records, form: str) -> None:
        """Keys may have another float type or memory layout, or be read-only.

        If this fails, check that `add` begins with `checked_records`.
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
        """One call cannot say two things about one id; nothing of it is stored.

        If this fails, check that `add` begins with `checked_records`.
        """
        with _refused(ValueError, store, records):
            store.add(np.array([5, 6, 5]), records.keys[:3], records.groups[:3])

    def test_wrong_dim_is_refused(self, store: Datastore, records: Records) -> None:
        """Keys of another dim raise; nothing is stored.

        If this fails, check that `add` begins with `checked_records`.
        """
        with _refused(DimensionMismatchError, store, records):
            store.add(records.ids[:3], records.keys[:3, :-1], records.groups[:3])

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_key_that_is_not_finite_is_refused(
        self, store: Datastore, records: Records, value: float
    ) -> None:
        """NaN and infinities raise; nothing is stored, not even the good rows of the call.

        If this fails, check that `add` begins with `checked_records`.
        """
        keys = records.keys[:3] * 2
        keys[1, 2] = value
        with _refused(InvalidVectorError, store, records):
            store.add(records.ids[:3], keys, records.groups[:3])

    @pytest.mark.parametrize(
        "wrong", ["one axis", "fewer ids", "fewer groups", "negative id", "negative group"]
    )
    def test_arguments_that_do_not_fit_are_refused(
        self, store: Datastore, records: Records, wrong: str
    ) -> None:
        """Arrays of the wrong shape and negative numbers raise `ValueError`; nothing is stored.

        If this fails, check that `add` begins with `checked_records`.
        """
        ids, keys, groups = np.arange(3), records.keys[:3] * 2, np.zeros(3, np.int32)
        changes = {
            "one axis": (ids, keys[0], groups),
            "fewer ids": (ids[:2], keys, groups),
            "fewer groups": (ids, keys, groups[:2]),
            "negative id": (ids - 1, keys, groups),
            "negative group": (ids, keys, groups - 1),
        }
        with _refused(ValueError, store, records):
            store.add(*changes[wrong])

    def test_great_key_is_kept_or_refused(self, store: Datastore, records: Records) -> None:
        """A finite key beyond half precision (65504) is kept or refused; it never becomes infinite.

        If this fails, check the range before rounding keys to half precision.
        """
        great = Records(np.array([1]), np.full((1, self.dim), 100_000, np.float32), np.array([0], np.int32))
        try:
            great.put(store)
        except InvalidVectorError:
            check_holds(store, records)
        else:
            check_holds(store, great + records)


@contextmanager
def _refused(error: type[Exception], store: Datastore, records: Records) -> Iterator[None]:
    """Check that the block raises and that the store still holds exactly these records."""
    with pytest.raises(error):
        yield
    check_holds(store, records)

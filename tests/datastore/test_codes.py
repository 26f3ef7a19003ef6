"""Keys as codes and packed ids: against numpy, through the life of a datastore, and damaged."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from knnstore_cells import CellsDatastore
from knnstore_cells.policy import Policy

from knnstore.datastore import (
    IdRanges,
    KeySegments,
    Metric,
    positions_from_ids,
    record_ids,
    split_visits,
    tokens_from_ids,
)
from knnstore.datastore.embedded.codecs import Coding, ProductCodec, codec_from_bytes, fit_codec
from knnstore.datastore.embedded.packed_ids import IdsPacker, PackedIds, is_worth_packing
from knnstore.errors import ConfigError, CorruptDatastoreError

DIM = 24
RNG = np.random.default_rng(4)
KINDS = ["int8", "pq6", "pq24", "pq100"]


def clustered(n: int, dim: int = DIM, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(9).normal(size=(20, dim)) * 4
    return (centers[rng.integers(0, 20, n)] + rng.normal(size=(n, dim)) * np.linspace(0.2, 1.5, dim)).astype(
        np.float32
    )


def lost(keys: np.ndarray, others: np.ndarray) -> float:
    """Share of the keys' spread."""
    return float(((keys - others) ** 2).sum() / ((keys - keys.mean(0)) ** 2).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 7, DIM])
def test_codes_are_of_near_keys_and_survive_their_bytes(kind: str, dim: int) -> None:
    codec, keys = fit_codec(kind, clustered(1000, dim)), clustered(300, dim, seed=1)
    codes = codec.encode(keys)
    assert codes.shape == (300, codec.size)
    assert codec.size == (4 + dim if kind == "int8" else 1 + min(int(kind[2:]), dim))
    decoded = codec.decode(codes)
    assert lost(keys, decoded) < (0.001 if kind == "int8" else 0.2)
    again = codec_from_bytes(kind, dim, codec.to_bytes())
    np.testing.assert_array_equal(again.encode(keys), codes)
    np.testing.assert_array_equal(again.decode(codes), decoded)
    if codec.rotation is not None:  # a turn keeps distances
        there = ((codec.decode_rotated(codes)[:50, None] - keys @ codec.rotation) ** 2).sum(2)
        here = ((decoded[:50, None].astype(np.float64) - keys) ** 2).sum(2)
        np.testing.assert_allclose(there, here, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_no_keys_give_no_codes_and_no_keys_again(kind: str) -> None:
    codec = fit_codec(kind, clustered(300))
    codes = codec.encode(clustered(0))
    assert codes.shape == (0, codec.size)
    assert codec.decode(codes).shape == (0, DIM)


def test_a_codec_of_one_key_gives_it_back() -> None:
    key = clustered(1)
    codec = fit_codec("pq6", key)
    np.testing.assert_allclose(codec.decode(codec.encode(key)), key, atol=1e-2)


@pytest.mark.parametrize(("dim", "parts", "count"), [(DIM, 5, 50), (DIM, 5, 3001), (200, 2, 9001)])
def test_each_part_is_named_by_its_nearest_entry(dim: int, parts: int, count: int) -> None:
    codec, keys = ProductCodec.fit(clustered(1000, dim), parts), clustered(count, dim, seed=1)
    rotation, centers, books = (array.astype(np.float64) for array in codec._stored)
    turned = keys.astype(np.float64) @ rotation
    codes = codec.encode(keys)
    pieces = (turned - centers[codes[:, 0]]).reshape(count, parts, -1)
    check_nearest(turned, centers, codes[:, 0])
    for part in range(parts):
        check_nearest(pieces[:, part], books[part], codes[:, part + 1])
    used = np.flatnonzero(rotation.any(0))
    np.testing.assert_allclose(rotation[:, used].T @ rotation[:, used], np.eye(dim), atol=2e-3)
    products = [np.log((pieces[:, at].var(0) + 1e-30)[pieces[:, at].any(0)]).sum() for at in range(parts)]
    assert max(products) - min(products) < 4, "the components are not shared out evenly"


def check_nearest(keys: np.ndarray, entries: np.ndarray, chosen: np.ndarray) -> None:
    """No other entry is nearer than the chosen one, up to rounding."""
    squares = (keys**2).sum(1)[:, None] + (entries**2).sum(1) - 2 * keys @ entries.T
    excess = squares[np.arange(len(keys)), chosen] - squares.min(1)
    assert excess.max() <= 1e-3 * ((keys**2).sum(1).mean() + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_keys_stay_finite(kind: str) -> None:
    for keys in (np.full((9, DIM), 3e6), np.zeros((300, DIM)), np.eye(DIM) * 1e5):
        codec = fit_codec(kind, keys.astype(np.float32))
        assert np.isfinite(codec.decode(codec.encode(keys.astype(np.float32)))).all()


@given(
    runs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=20),
    largest=st.sampled_from([1, 1 << 16, 1 << 20]),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    first=st.sampled_from([0, 1, (1 << 43) - 300]),
)
def test_packed_ids_are_the_ids(runs, largest: int, cuts: list[int], first: int) -> None:
    positions, at = [], first
    for gap, length in runs:
        positions += range(at, at + length)
        at += length + gap
    ids = record_ids(np.array(positions), RNG.integers(0, largest, len(positions)))
    packer, parts = IdsPacker(), np.split(ids, sorted(cut % (len(ids) + 1) for cut in cuts))
    content = [packer.add_ids(part).tobytes() for part in parts if len(part)]
    count = packer.finish(lambda array: content.append(array.tobytes()))
    assert count == len(runs)
    packed = PackedIds(np.frombuffer(b"".join(content), np.uint8), len(ids), count)
    np.testing.assert_array_equal(packed.decode_all(), ids)
    rows = RNG.integers(0, len(ids), 10)
    np.testing.assert_array_equal(packed.decode_rows(rows), ids[rows])


def test_scattered_ids_are_not_packed() -> None:
    assert is_worth_packing([record_ids(np.arange(100), np.arange(100))])
    assert not is_worth_packing([record_ids(np.arange(100) * 2, np.arange(100))])


def coded(root: Path, mode: str = "a", *, kind: str = "pq6", metric: Metric = Metric.L2) -> CellsDatastore:
    return CellsDatastore.open(root, dim=DIM, metric=metric, mode=mode, cells=8, codes=kind, coded_from=500)  # type: ignore[arg-type]


def put(store: CellsDatastore, positions: np.ndarray, group: int = 0) -> None:
    store.add(
        record_ids(positions, positions % 70_000), KEYS[positions], np.full(len(positions), group, np.int32)
    )


KEYS = clustered(4000)


def held(store: CellsDatastore) -> dict[int, np.ndarray]:
    return {int(id): key for ids, keys, _ in store.iterate() for id, key in zip(ids, keys, strict=True)}


def are_same(one: dict[int, np.ndarray], other: dict[int, np.ndarray]) -> bool:
    """Compare records; a decoded key is a product of matrices, whose last bit depends on the batch."""
    return one.keys() == other.keys() and all(is_same(one[id], other[id]) for id in one)


def is_same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.allclose(one, other, rtol=1e-5, atol=1e-5)


def met(store: CellsDatastore) -> set[int]:
    """Positions of the records in all cells."""
    visits = split_visits(store.visit(KEYS[:2], 1 << 16))
    return {int(position) for visit in visits for position in positions_from_ids(visit.ids)}


def key_files(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.keys"))


@pytest.mark.parametrize("kind", ["pq6", "int8"])
@pytest.mark.parametrize("metric", list(Metric))
def test_the_life_of_a_coded_group(tmp_path: Path, kind: str, metric: Metric) -> None:
    """Few records stay as they are; many are coded, once: no merge and no rewriting changes them again."""
    root = tmp_path / "store"
    with (
        closing(coded(root, kind=kind, metric=metric)) as store,
        closing(coded(root, "r", kind=kind, metric=metric)) as reader,
    ):
        put(store, np.arange(300))
        store.optimize()
        half = KEYS[:300].astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal([*held(store).values()], half)
        put(store, np.arange(300, 1500))
        put(store, np.arange(0, 400), group=1)
        store.optimize()
        first = held(store)
        found = np.stack([*first.values()])
        assert lost(KEYS[400:1500], found[400:]) < 0.2
        assert (found[400:] != KEYS[400:1500].astype(np.float16)).any(1).mean() > 0.9
        np.testing.assert_array_equal(found[:400], KEYS[:400].astype(np.float16))  # group 1 is small
        assert key_files(root) == 1100 * (7 if kind == "pq6" else 4 + DIM) + 400 * 2 * DIM
        for start in range(1500, 2500, 100):
            put(store, np.arange(start, start + 100))
            store.flush()
        store.delete(IdRanges([(int(id), int(id) + 1) for id in list(first)[900:1200]]))
        before = held(store)
        assert are_same(
            {id: key for id, key in first.items() if id in before},
            {id: before[id] for id in first if id in before},
        )
        store.optimize()
        store.vacuum()
        assert are_same(held(store), before)
        assert are_same(held(reader), before)
        queries, now = (
            clustered(20, seed=2),
            np.stack([*before.values()]),
        )
        products = queries.astype(np.float64) @ now.T.astype(np.float64)
        squares = (queries.astype(np.float64) ** 2).sum(1)[:, None] + (now.astype(np.float64) ** 2).sum(1)
        truth = squares - 2 * products if metric is Metric.L2 else -products
        column = {id: at for at, id in enumerate(before)}
        for one in (store, reader):
            met = 0
            for visit in split_visits(one.visit(queries, 1 << 16)):
                columns = [column[id] for id in visit.ids.tolist()]
                np.testing.assert_allclose(visit.distances, truth[np.ix_(visit.queries, columns)], 3e-3, 5e-2)
                met += visit.distances.size
            assert met == truth.size
        assert store.verify() == []
    with closing(coded(root, kind=kind, metric=metric)) as store:
        assert are_same(held(store), before)
        codecs = list(root.rglob("*.codec"))
        assert len(codecs) == 1
        store.delete(IdRanges([(int(record_ids(np.array([400]), np.array([0]))[0]), 1 << 60)]))
        store.flush()
        assert not list(root.rglob("*.codec"))


def test_a_store_that_was_coded_stays_so_whatever_is_asked_for(tmp_path: Path) -> None:
    with closing(coded(tmp_path / "store")) as store:
        put(store, np.arange(1000))
        store.optimize()
    with closing(coded(tmp_path / "store", kind="none")) as store:
        put(store, np.arange(1000, 2000))
        store.optimize()
        assert key_files(tmp_path / "store") == 2000 * 7


def test_what_was_kept_in_half_precision_is_coded_with_the_rest(tmp_path: Path) -> None:
    """Also a large segment that nothing is merged with."""
    with closing(coded(tmp_path / "store", kind="none")) as store:
        put(store, np.arange(3000))
        store.optimize()
    with closing(CellsDatastore.open(tmp_path / "store", dim=DIM, codes="pq6", coded_from=100)) as store:
        put(store, np.arange(3000, 3200))
        store.optimize()
        assert key_files(tmp_path / "store") == 3200 * 7


def test_keys_wait_for_a_codec_of_all_of_them(tmp_path: Path) -> None:
    """It knows the last as it knows the first, and codes each once; until then all are met as they are."""
    root, keys = tmp_path / "store", np.concatenate([clustered(900), clustered(900, seed=1) * 2 + 40])
    ids = record_ids(np.arange(1800), np.zeros(1800, np.int64))
    with closing(coded(root)) as store, closing(coded(root, "r")) as reader:
        for rows in np.split(np.arange(1800), 6):
            store.add(ids[rows], keys[rows], np.zeros(300, np.int32))
            store.flush()
        assert key_files(root) == 1800 * 2 * DIM
        assert met(reader) == set(range(1800))
        store.optimize()
        assert key_files(root) == 1800 * 7
        (segment,) = store._segments.snapshot()
        half = keys.astype(np.float16).astype(np.float32)
        codes = segment.columns.codec.encode(half)
        np.testing.assert_array_equal(
            segment.columns.codes_at(np.arange(1800), segment.columns.codec_file), codes
        )
        for part in (slice(0, 900), slice(900, 1800)):
            assert lost(half[part], segment.columns.keys[part]) < 0.2
        assert met(reader) == set(range(1800))


def test_not_too_many_keys_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is so large is coded as it comes, from some key on; what is before is coded afterwards."""
    root = tmp_path / "store"
    monkeypatch.setattr("knnstore_cells.policy._WAITING", 2000 * 2 * DIM)
    with closing(coded(root)) as store, closing(coded(root, "r")) as reader:
        for start, stop, size in ((0, 1900, 1900 * 2 * DIM), (1900, 2300, 1900 * 2 * DIM + 400 * 7)):
            put(store, np.arange(start, stop))
            store.flush()
            assert key_files(root) == size
            assert met(reader) == set(range(stop))
        before = held(store)
        store.optimize()
        assert key_files(root) == 2300 * 7
        after = held(store)
        assert [is_same(before[id], after[id]) for id in before] == [False] * 1900 + [True] * 400
        assert lost(KEYS[:1900], np.stack([*after.values()])[:1900]) < 0.2


def test_damage_among_keys_that_wait_costs_what_is_damaged(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with closing(coded(root)) as store:
        for start in range(0, 1500, 500):
            put(store, np.arange(start, start + 500))
            store.flush()
        first = store._segments.snapshot()[0].entry.keys.name
    content = bytearray((root / first).read_bytes())
    content[100] ^= 1
    (root / first).write_bytes(content)
    with closing(coded(root)) as store:
        store.optimize()
        assert set(held(store)) == set(record_ids(np.arange(500, 1500), np.arange(500, 1500)).tolist())
        assert key_files(root) == 500 * 2 * DIM + 1000 * 7
        assert len(store.verify()) == 1


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_codec_costs_its_group(tmp_path: Path, damage: str) -> None:
    """It is named, the other groups are read, and what is added then is coded anew."""
    root = tmp_path / "store"
    with closing(coded(root)) as store:
        put(store, np.arange(1000))
        put(store, np.arange(1000, 2000), group=1)
        store.optimize()
        groups = {s.group: s.entry.codes.file.name for s in store._segments.snapshot()}
    path = root / groups[0]
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    with closing(coded(root, "r")) as store:
        found = store.search(KEYS[:30], 5)
        assert (tokens_from_ids(found.ids) >= 1000).all()
        assert met(store) == set(range(1000, 2000))
    with closing(coded(root)) as store:
        problems = store.verify()
        assert len(problems) == 1
        assert str(path) in problems[0]
        assert [part.group for part in store.list_damaged_parts()] == [0]
        assert len(held(store)) == 1000
        put(store, np.arange(2000, 3000))
        store.optimize()
        assert len(held(store)) == 2000
        assert {s.group for s in store._segments.list_readable_segments()} == {0, 1}
        store.remove_damaged_part(store.list_damaged_parts()[0])
        assert store.verify() == []


def test_a_codec_is_read_when_its_file_is_gone(tmp_path: Path) -> None:
    """A reader goes on with what it has mapped while a writer removes the group."""
    root = tmp_path / "store"
    with closing(coded(root)) as store:
        put(store, np.arange(1000))
        store.optimize()
        with closing(coded(root, "r")) as reader:
            batches = reader.iterate(batch_size=100)
            segments = reader._segments.list_readable_segments()
            store.delete(IdRanges([(0, 1 << 60)]))
            store.optimize()
            assert not list(root.rglob("*.codec"))
            assert len(segments[0].columns.keys_at(np.arange(10))) == 10
            del batches


@pytest.mark.parametrize(
    ("dim", "params", "expected"),
    [
        (256, {}, Coding("pq32", 1 << 15, 1 << 19)),
        (4096, {}, Coding("pq128", 1 << 13, 1 << 15)),
        (1 << 16, {}, Coding("pq128", 512, 1 << 11)),
        (256, {"coded_from": 1 << 20}, Coding("pq32", 1 << 20, 1 << 20)),
        (16, {}, None),
    ],
)
def test_from_how_many_keys_on_a_group_is_coded(dim: int, params: dict[str, int], expected: Coding) -> None:
    """As many as a codec is fitted to; 256 MiB of half precision may wait while text comes."""
    assert Policy.from_params(params).choose_coding(dim) == expected


def test_kinds_are_checked(tmp_path: Path) -> None:
    for kind in ("pq0", "pq", "pq99999", "float", 8, None):
        with pytest.raises(ConfigError, match="codes must be"):
            CellsDatastore.open(tmp_path / "store", dim=DIM, codes=kind)
    with pytest.raises(CorruptDatastoreError, match="no codec pq6"):
        codec_from_bytes("pq6", DIM, b"123")


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[KeySegments]:
    with closing(KeySegments(tmp_path / "store", DIM, Metric.L2, "a", Coding("pq6", 100, 100))) as opened:
        yield opened


def test_what_is_spilled_before_a_flush_is_coded(segments: KeySegments) -> None:
    """So a large text takes the room of its codes from the start."""
    ids = np.arange(4000)
    segments.append(ids, KEYS, np.zeros(4000, np.int32))
    segments.flush()
    assert key_files(segments.root) == 4000 * 7

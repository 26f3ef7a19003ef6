import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from knnstore.catalog import Catalog, CatalogWriter, NewDocument
from knnstore.datastore import IdRanges
from knnstore.datastore.records import tokens_from_ids
from knnstore.errors import (
    AmbiguousDocumentError,
    ConfigError,
    DatastoreError,
    DocumentNotFoundError,
    DomainNotFoundError,
    FencedError,
    KnnstoreError,
    LockedError,
    ReadOnlyError,
    StoreExistsError,
    StoreNotFoundError,
)
from knnstore.store import KNNStore, SavedSettings, Selection


def nearest(keys: np.ndarray, tokens: np.ndarray, query: np.ndarray, k: int) -> tuple[list[float], list[int]]:
    distances = ((keys.astype(np.float64) - query) ** 2).sum(1)
    order = np.argsort(distances)[:k]
    return distances[order].tolist(), tokens[order].tolist()


def test_search_agrees_with_numpy_over_what_is_selected(store, writer) -> None:
    writer.add("law", "1", "2", tags=frozenset({"old"}))
    writer.add("news", "1", "3", tags=frozenset({"old", "new"}))
    writer.add("news", "4")
    selections = {
        Selection(): [("law", "1"), ("law", "2"), ("news", "1"), ("news", "3"), ("news", "4")],
        Selection(domains=("news",)): [("news", "1"), ("news", "3"), ("news", "4")],
        Selection(domains=("news", "law"), tags=("new",)): [("news", "1"), ("news", "3")],
        Selection(tags=("old", "new")): [("law", "1"), ("law", "2"), ("news", "1"), ("news", "3")],
        Selection(documents=("1",)): [("law", "1"), ("news", "1")],
        Selection(domains=("law",), documents=("1",)): [("law", "1")],
    }
    query = writer.rng.standard_normal((1, 8)).astype(np.float32)
    for selection, members in selections.items():
        keys = np.concatenate([writer.keys[member] for member in members])
        tokens = np.concatenate([writer.tokens[member] for member in members])
        found = store.search(query, 30, selection)
        distances, expected = nearest(keys, tokens, query[0], 30)
        n = len(distances)
        assert found.distances[0, :n] == pytest.approx(distances, rel=1e-4)
        assert tokens_from_ids(found.ids[0, :n]).tolist() == expected
        assert (found.ids[0, n:] == -1).all()
        assert np.isinf(found.distances[0, n:]).all()


def test_what_a_commit_removes_during_a_search_is_not_returned(store, writer, monkeypatch) -> None:
    writer.add("law", "1", "2")
    search, removed = type(store.view()).search, []

    def overtaken(self, *args):
        found = search(self, *args)
        if not removed:
            removed.append(store.remove_document("1"))
        return found

    monkeypatch.setattr(type(store.view()), "search", overtaken)
    found = store.search(writer.keys["law", "1"], 30)
    assert removed
    left = [document.id for document in store.documents()]
    assert left == ["2"]
    sources = {place.document for row in found.ids for place in store.provenance(row) if place is not None}
    assert sources == {"2"}
    assert (found.ids[:, 20:] == -1).all(), "nothing but the twenty records that are left"


def test_excluding_by_content_leaves_exactly_that_document_out(store, writer) -> None:
    writer.add("law", "1", "2")
    hashes = {document.id: document.content_hash for document in store.documents()}
    found = store.search(writer.keys["law", "1"], 1, Selection().without_content(hashes["1"]))
    assert {place.document for place in store.provenance(found.ids[:, 0])} == {"2"}


def test_tokens_are_counted_in_what_is_selected(store, writer) -> None:
    writer.add("a", "1", "2", n=300)
    writer.add("b", "1", n=50)

    def counted(*documents: tuple[str, str]) -> list[int]:
        return np.bincount(np.concatenate([writer.tokens[at] for at in documents]), minlength=1000).tolist()

    assert store.token_counts().tolist() == counted(("a", "1"), ("a", "2"), ("b", "1"))
    assert store.token_counts(Selection(domains=("b",))).tolist() == counted(("b", "1"))
    store.remove_document("2")
    assert store.token_counts().tolist() == counted(("a", "1"), ("b", "1"))


def test_records_are_read_of_what_is_selected_but_for_some_documents(store, writer) -> None:
    writer.add("law", "1", "2")
    writer.add("news", "3", n=7)
    law = Selection(domains=("law",))
    first, second = store.lengths(law)
    assert store.lengths() == {first: 20, second: 20, second + 1: 7}
    assert store.tokens_by_number(second).tolist() == writer.tokens["law", "2"].tolist()
    batches = list(store.records(law, without=[first], batch_size=15))
    assert (
        np.concatenate([tokens_from_ids(batch.ids) for batch in batches]).tolist()
        == store.tokens_by_number(second).tolist()
    )
    assert np.array_equal(np.concatenate([batch.keys for batch in batches]), writer.keys["law", "2"])
    with pytest.raises(DomainNotFoundError):
        next(store.records(Selection(domains=("tax",))))
    store.remove_document("2")
    with pytest.raises(DocumentNotFoundError):
        store.tokens_by_number(second)


def test_provenance_names_document_position_and_surroundings(store, writer) -> None:
    writer.add("law", "1", "2")
    found = store.search(writer.keys["law", "2"][5:6], 1)
    place = store.provenance(found.ids[0], before=3, after=2)[0]
    tokens = writer.tokens["law", "2"]
    assert (place.document, place.domain, place.position, place.token) == ("2", "law", 5, tokens[5])
    assert place.context.tolist() == tokens[2:5].tolist()
    assert place.continuation.tolist() == tokens[6:8].tolist()
    assert store.provenance(np.array([-1])) == [None]
    store.remove_document("2")
    assert store.provenance(found.ids[0]) == [None]


def test_adding_again_replaces_and_keeps_other_domains(store, writer) -> None:
    writer.add("law", "1")
    writer.add("news", "1")
    old = writer.keys["law", "1"]
    writer.add("law", "1", n=7)
    assert [(d.domain, d.id, d.tokens) for d in store.documents()] == [("news", "1", 20), ("law", "1", 7)]
    assert store.datastore.count() == 27
    assert (store.search(old, 1).distances > 1e-4).all()
    with pytest.raises(AmbiguousDocumentError, match="law"):
        store.document("1")
    assert store.document("1", domain="news").tokens == 20


def test_removing_documents_and_domains_leaves_nothing_of_them(store, writer) -> None:
    writer.add("law", "1", "2")
    writer.add("news", "3")
    store.remove_document("1")
    assert store.remove_domain("news").documents == 1
    assert [d.id for d in store.documents()] == ["2"]
    assert [d.name for d in store.domains()] == ["law"]
    found = store.search(writer.keys["news", "3"], 100)
    assert set(tokens_from_ids(found.ids[found.ids >= 0])) <= set(writer.tokens["law", "2"])
    assert store.verify() == []
    with pytest.raises(DomainNotFoundError, match="the domains are: law"):
        store.remove_domain("news")
    with pytest.raises(DocumentNotFoundError):
        store.remove_document("1")


def test_tags_are_changed_without_touching_records(store, writer) -> None:
    writer.add("law", "1", metadata={"year": 2026}, tags=frozenset({"a", "b"}))
    store.retag("1", add=["c"], remove=["a"])
    document = store.document("1")
    assert document.tags == ("b", "c")
    assert document.metadata == {"year": 2026}
    assert (store.search(writer.keys["law", "1"], 1, Selection(tags=("c",))).distances < 1e-4).all()
    assert (store.search(writer.keys["law", "1"], 1, Selection(tags=("a",))).ids == -1).all()


def test_what_a_condition_selects_is_searched_retagged_and_removed(
    catalog_url, identity, home, writer_of
) -> None:
    with KNNStore.create(home, identity, catalog=catalog_url.render_as_string(hide_password=False)) as store:
        writer = writer_of(store)
        for year in range(2018, 2023):
            writer.add("law" if year % 2 else "tax", str(year), metadata={"year": year})
        recent = Selection(where="year >= 2021")
        queries = np.zeros((3, 8), np.float32)
        found = store.search(queries, 100, recent)
        assert {one.document for one in store.provenance(found.ids[found.ids >= 0])} == {"2021", "2022"}
        assert store.record_count(recent) == 40
        assert [one.id for one in store.select(Selection(domains=["law"], where="year < 2021"))] == ["2019"]
        store.replace_metadata("law", {"2019": ({"year": 2030}, [])})
        assert store.record_count(recent) == 60  # the view follows the metadata
        store.rename("law", {"2019": "2030"})
        ids = store.search(queries, 100, recent).ids
        assert {one.document for one in store.provenance(ids[ids >= 0])} == {"2021", "2022", "2030"}
        store.rename("law", {"2030": "2019"})
        assert store.retag_selected(recent, add=["new"]) == 3
        assert {one.id for one in store.documents(tag="new")} == {"2019", "2021", "2022"}
        assert {one.id for one in store.remove_selected(recent)} == {"2019", "2021", "2022"}
        assert [one.id for one in store.select(Selection())] == ["2018", "2020"]
        assert store.verify() == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tags": "old"}, "write tags=('old',)"),
        ({"domains": [1]}, "strings, not int"),
        ({"documents": 7}, "tuple of strings, not int"),
        ({"exclude": None}, "tuple of strings, not NoneType"),
        ({"where": ("a = 1",)}, "is a string such as"),
        ({"where": "a = "}, "its end"),
    ],
)
def test_a_selection_refuses_what_it_would_misread(given, said) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Selection(**given)


def test_a_selection_says_what_was_given() -> None:
    selection = Selection(domains=["a", "b"], where="x exists")
    assert repr(selection) == "Selection(domains=('a', 'b'), where='x exists')"
    assert {selection: 1}[eval(repr(selection))] == 1
    assert repr(Selection()) == "Selection()"


def test_what_is_not_committed_is_neither_found_nor_takes_a_place(store, writer) -> None:
    writer.add("law", "1")
    query = writer.keys["law", "1"][:3]
    before = store.search(query, 5)
    new = writer._new("law", "2", 20)
    with pytest.raises(RuntimeError, match="stop"), store.ingest([new]) as group:
        writer.keys["law", "2"][:3] = query  # would be the nearest
        writer.put(group, 0, new)
        for selection in (Selection(), Selection(domains=("law",))):
            during = store.search(query, 5, selection)
            assert np.array_equal(during.ids, before.ids)
        raise RuntimeError("stop")
    assert np.array_equal(store.search(query, 5).ids, before.ids)
    assert store.datastore.count() == 20
    assert [d.id for d in store.documents()] == ["1"]


def test_a_reader_sees_each_commit_without_reopening(store, writer, home) -> None:
    with KNNStore.open(home) as reader:
        for id in ("1", "2", "3"):
            writer.add("law", id)
            found = reader.search(writer.keys["law", id], 1)
            assert (found.distances < 1e-4).all()
            assert {place.document for place in reader.provenance(found.ids[:, 0])} == {id}
        store.remove_document("2")
        assert (reader.search(writer.keys["law", "2"], 1).distances > 1e-4).all()
        with pytest.raises(ReadOnlyError, match="mode 'a'"):
            reader.remove_document("1")


def test_readers_see_the_old_or_the_new_version_never_both_nor_none(store, writer, home) -> None:
    writer.add("law", "1", n=5)
    seen, failures = set(), []
    done = threading.Event()

    def read() -> None:
        with KNNStore.open(home) as reader:
            while not done.is_set():
                ids = reader.search(np.zeros((1, 8), np.float32), 100).ids[0]
                positions = np.sort(ids[ids >= 0] >> 20)
                seen.add(len(positions))
                if len(positions) != 5 or positions[-1] - positions[0] != 4:
                    failures.append(positions)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(25):
        writer.add("law", "1", n=5)
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert seen == {5}


def test_the_second_writer_is_told_who_holds_the_lock(store, home) -> None:
    with pytest.raises(LockedError, match=r"process \d+"):
        KNNStore.open(home, "a")
    store.close()
    KNNStore.open(home, "a").close()


def test_a_closed_store_is_neither_read_nor_written(store, home, writer_of) -> None:
    writer_of(store).add("law", "1")
    store.close()
    for use in (
        store.documents,
        store.domains,
        store.revision,
        store.verify,
        lambda: store.search(np.zeros((1, store.identity.dim), np.float32), 1),
        lambda: store.retag("1", domain="law", add=["late"]),
        lambda: store.remove_document("1", domain="law"),
    ):
        with pytest.raises(KnnstoreError, match="closed"):
            use()
    store.close()
    with KNNStore.open(home) as reader:
        assert [(document.id, document.tags) for document in reader.documents()] == [("1", ())]


@pytest.mark.parametrize("mode", ["w", "x", "rb", ""])
def test_a_mode_of_files_is_refused_and_changes_nothing(store, home, mode) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"not {mode!r}")):
        KNNStore.open(home, mode)
    assert store.verify() == []


_WITHOUT_CLOSING = """
import atexit, sys
from pathlib import Path
reserve = Path(sys.argv[1]) / "reserve"  # a writer makes it when it is closed
atexit.register(lambda: print(reserve.exists()))
from knnstore.store import KNNStore
store = KNNStore.open(sys.argv[1], "a")
reserve.unlink()
"""


def test_a_script_may_forget_to_close_the_store(store, home) -> None:
    store.close()
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_CLOSING, home], check=True, capture_output=True, text=True
    )
    assert (ended.stdout.split(), ended.stderr) == (["True"], "")
    with KNNStore.open(home, "a") as again:
        assert again.verify() == []


def test_a_store_is_whole_or_not_there(home, identity, tmp_path) -> None:
    with pytest.raises(StoreNotFoundError, match="knnstore init"):
        KNNStore.open(home)
    with pytest.raises(ConfigError):
        KNNStore.create(home, identity, params={"no such": 1})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="keeps nothing"):
        KNNStore.create(home, identity, store="memory")
    assert list(tmp_path.iterdir()) == []
    KNNStore.create(home, identity).close()
    with pytest.raises(StoreExistsError):
        KNNStore.create(home, identity)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        KNNStore.create(tmp_path / "full", identity)


def test_lost_keys_are_noticed_and_not_replaced_by_nothing(store, writer, home) -> None:
    writer.add("law", "1")
    store.close()
    (home / "keys").rename(home / "away")
    with pytest.raises(DatastoreError):
        KNNStore.open(home, "a")
    (home / "away").rename(home / "keys")
    with KNNStore.open(home, "a") as again:
        assert again.verify() == []


def test_verify_finds_records_that_differ_from_the_catalog(store, writer) -> None:
    writer.add("law", "1", "2")
    live = store.view().build_scope(Selection(documents=("1",))).live
    store.datastore.delete(live)
    problems = store.verify()
    assert len(problems) == 1
    assert "'1' of domain 'law'" in problems[0]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_verify_misses_not_one_record(home, identity, writer_of, has_prefix) -> None:
    with KNNStore.create(home, replace(identity, has_prefix=has_prefix)) as store:
        writer = writer_of(store)
        writer.add("law", "1", "2")
        ids = np.concatenate([ids for ids, _, _ in store.datastore.iterate()])
        if not has_prefix:  # then a first token has no record
            assert len(store.verify()) == 2
            store.datastore.delete(IdRanges.from_ids(ids[[0, 20]]))
        assert store.verify() == []
        store.datastore.delete(IdRanges.from_ids(ids[25:26]))
        (problem,) = store.verify()
        assert "'2' of domain 'law'" in problem


def test_readers_are_told_of_what_is_half_done_and_repair_settles_it(store, writer, home) -> None:
    writer.add("law", "1")
    with store.ingest([new := writer._new("law", "2", 20)]) as group, KNNStore.open(home) as reader:
        assert "1 documents are half added" in reader.verify()[0]
        writer.put(group, 0, new)
        store.datastore.flush()
        assert len(reader.verify()) == 1
    assert store.verify() == []
    store.datastore.add(np.array([77 << 40]), np.ones((1, 8), np.float32), np.array([1], np.int32))
    (problem,) = store.verify()
    assert problem == "1 records belong to no document: run `knnstore repair`"
    assert store.repair() == []
    assert store.datastore.count() == 40


def test_a_writer_that_lost_the_store_takes_its_records_back(store, writer) -> None:
    writer.add("law", "1")
    catalog = Catalog.open(store.home.catalog_url)
    with pytest.raises(FencedError), store.ingest([new := writer._new("law", "2", 20)]) as group:
        other = CatalogWriter(catalog)
        other.delete_documents([document.row for document in other.unsettled_documents()])  # as it recovers
        writer.put(group, 0, new)
    assert store.datastore.count() == 20
    assert store.verify() == []
    catalog.close()


def test_moving_keeps_every_answer_and_readers_follow(store, writer, home) -> None:
    writer.add("law", "1", "2")
    writer.add("news", "3")
    query = writer.rng.standard_normal((4, 8)).astype(np.float32)
    before = store.search(query, 15)
    with KNNStore.open(home) as reader:
        reader.search(query, 1)
        store.move("faiss", "elsewhere")
        for handle in (store, reader):
            after = handle.search(query, 15)
            assert np.array_equal(after.ids, before.ids)
            assert np.allclose(after.distances, before.distances, rtol=1e-6)
            assert handle.engine.location == "elsewhere"
    with pytest.raises(DatastoreError):
        store.move("faiss", "elsewhere")
    assert store.verify() == []
    writer.add("news", "4")
    store.close()
    with KNNStore.open(home) as again:
        assert (again.search(writer.keys["news", "4"], 1).distances < 1e-4).all()


def test_positions_are_not_used_again(store, writer) -> None:
    writer.add("law", "1")
    store.remove_domain("law")
    writer.add("law", "1")
    assert store.view().snapshot.starts.tolist() == [20]


def test_settings_are_kept_for_each_set_of_domains(store) -> None:
    assert store.settings() is None
    saved = SavedSettings({"k": 8}, calibration={"mixer": "fixed"})
    store.save_settings(saved, ["b", "a"])
    assert store.settings(["a", "b"]) == saved
    assert store.settings(["a"]) is None


def test_documents_without_records_are_fine(home, identity) -> None:
    with KNNStore.create(home, replace(identity, has_prefix=False)) as store:
        with store.ingest([NewDocument("one token", "law", "0" * 64, np.array([5], np.uint32))]):
            pass  # without a prefix nothing predicts a first token
        assert store.document("one token").tokens == 1
        assert store.verify() == []


def test_a_home_can_be_moved_to_another_folder(store, writer, home: Path) -> None:
    writer.add("law", "1")
    store.close()
    home.rename(home.with_name("moved"))
    with KNNStore.open(home.with_name("moved"), "a") as moved:
        assert (moved.search(writer.keys["law", "1"], 1).distances < 1e-4).all()


def test_a_store_lives_on_either_database(catalog_url, identity, home, writer_of) -> None:
    url = catalog_url.render_as_string(hide_password=False)
    with KNNStore.create(home, identity, catalog=url) as store:
        writer = writer_of(store)
        writer.add("law", "1", "2", metadata={"year": 2026}, tags=frozenset({"a"}))
        with KNNStore.open(home) as reader:
            writer.add("law", "1", n=5)
            store.remove_document("2")
            assert [(d.id, d.tokens) for d in reader.documents()] == [("1", 5)]
            assert (reader.search(writer.keys["law", "1"], 1).distances < 1e-4).all()
            assert (reader.search(writer.keys["law", "2"], 1).distances > 1e-4).all()
        assert store.verify() == []


def test_a_password_is_not_written_into_the_home(postgres, home, identity, monkeypatch) -> None:
    url = postgres.new_database().set(username="knnstore_password", password="s3cr%t")
    given = url.render_as_string(hide_password=False)
    KNNStore.create(home, identity, catalog=given).close()
    assert "s3cr" not in "".join(path.read_text() for path in home.glob("*.json"))
    monkeypatch.setenv("PGPASSWORD", "s3cr%t")
    monkeypatch.setenv("PGHOST", str(url.query["host"]))
    KNNStore.open(home).close()
    monkeypatch.delenv("PGPASSWORD")
    monkeypatch.setenv("KNNSTORE_CATALOG", given)
    KNNStore.open(home, "a").close()


def test_a_vocabulary_that_does_not_fit_a_record_id_is_refused(home, identity) -> None:
    with pytest.raises(ConfigError, match="1048577"):
        KNNStore.create(home, replace(identity, vocab_size=2**20 + 1))
    KNNStore.create(home, replace(identity, vocab_size=2**20)).close()


def test_moving_does_not_depend_on_how_the_keys_are_cut_into_batches(store, writer) -> None:
    for id in ("1", "2", "3"):
        writer.add("law", id, n=5000)  # batches of the source end where its segments do
    query = writer.rng.standard_normal((2, 8)).astype(np.float32)
    before = store.search(query, 15)
    store.move("faiss", "elsewhere")
    assert np.array_equal(store.search(query, 15).ids, before.ids)


def test_the_environment_cannot_lead_a_home_to_another_catalog(home, identity, tmp_path, monkeypatch) -> None:
    other = tmp_path / "other.db"
    KNNStore.create(tmp_path / "other", identity, catalog=f"sqlite:///{other}").close()
    monkeypatch.setenv("KNNSTORE_CATALOG", f"sqlite:///{other}")
    with KNNStore.create(home, replace(identity, key="another")) as mine:
        assert mine.identity.key == "another"
    monkeypatch.setenv("KNNSTORE_CATALOG", f"sqlite:///{tmp_path / 'third.db'}")
    with pytest.raises(ConfigError, match="names another"):
        KNNStore.open(tmp_path / "other")


def test_the_current_folder_can_be_a_home(identity, tmp_path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    KNNStore.create(".", identity).close()
    KNNStore.open(tmp_path / "here").close()


def test_a_reader_may_have_the_engine_search_otherwise(writer, home) -> None:
    writer.store.move("faiss", "elsewhere")
    writer.add("law", "1", "2", n=200)
    writer.store.optimize()
    query = np.zeros((1, 8), np.float32)
    for params in ({"index": "exact"}, {"index": "IVF4,SQ8", "nprobe": 1}):
        with KNNStore.open(home, params=params) as reader:
            assert reader.datastore.capabilities.exact_search == (params["index"] == "exact")
            assert (reader.search(query, 3).ids >= 0).all()
            assert reader.engine.params == {}
    with pytest.raises(ConfigError, match="accepted: "):
        KNNStore.open(home, params={"probes": 1})
    writer.store.close()
    with pytest.raises(ConfigError, match="knnstore move"):
        KNNStore.open(home, "a", params={"index": "exact"})

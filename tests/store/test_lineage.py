"""Weights fitted on the store's documents: gone, file and all, as soon as one of the documents is."""

from dataclasses import asdict

import numpy as np
import pytest

from knnstore.store import KNNStore, Lineage, NewDocument, SavedSettings, Selection


@pytest.fixture
def fitted(store, writer):
    """Documents a and b of law and c of news, with weights fitted on law and on everything."""
    writer.add("law", "a", "b")
    writer.add("news", "c")
    names = {}
    for domains in (("law",), ()):
        traces = Lineage.from_snapshot(store.view().snapshot, domains)
        names[domains] = store.save_weights({"w": np.zeros(4, np.float32)}, asdict(traces))
        part = {"weights": names[domains], "traces": asdict(traces)}
        store.save_settings(SavedSettings(query={"others": {"rows": part}}), domains)
    return names


def whole(store):
    """Which of the weights may be used, by their domains; and that exactly their files are there."""
    snapshot = store.view().snapshot
    found = {}
    for domains in (("law",), ()):
        saved = store.settings(domains)
        for name, traces in saved.list_weight_files().items() if saved else ():
            if traces and traces.removed_share(snapshot) == 0:
                found[domains] = name
    assert {file.name for file in (store.home.path / "weights").iterdir()} == set(found.values())
    assert store.verify() == []
    return set(found)


def test_what_is_added_leaves_them_as_they_are(store, writer, fitted) -> None:
    writer.add("law", "new")
    writer.add("tax", "d")
    writer.add("law", "empty", n=0)
    assert whole(store) == {("law",), ()}
    assert store.info()["trained"] == ["rows of law: ready", "rows of the whole store: ready"]


def test_a_document_removed_takes_them_with_it(store, writer, fitted) -> None:
    store.remove_document("c")
    assert whole(store) == {("law",)}
    assert store.info()["trained"] == [
        "rows of law: ready",
        "rows of the whole store: outdated, because documents were removed",
    ]
    store.remove_document("a")
    assert whole(store) == set()
    writer.add("law", "a", "e", "f")  # as many as before, and more
    assert whole(store) == set()


def test_weights_that_were_trained_on_no_document_stay_while_a_component_names_them(store, writer) -> None:
    writer.add("law", "a", "b")
    name = store.save_weights({"w": np.zeros(4, np.float32)}, {})
    store.save_settings(SavedSettings(query={"others": {"rows": {"weights": name}}}))
    store.remove_document("a")
    assert [file.name for file in (store.home.path / "weights").iterdir()] == [name]
    assert store.verify() == []
    store.save_settings(SavedSettings(query={"others": {"rows": {"lam": 0.5}}}))
    assert list((store.home.path / "weights").iterdir()) == []


def test_a_document_replaced_takes_them_with_it(store, writer, fitted) -> None:
    writer.add("law", "b")
    assert whole(store) == set()


def test_a_domain_removed_takes_them_with_it_even_if_its_name_comes_back(store, writer, fitted) -> None:
    store.remove_domain("law")
    assert whole(store) == set()
    writer.add("law", "a", "b")
    assert whole(store) == set()


@pytest.mark.parametrize("moment", ["catalog.retire.after", "catalog.forget.after"])
def test_a_killed_removal_is_finished_by_the_next_writer(store, fitted, home, killed_at, moment) -> None:
    store.close()

    def remove() -> None:
        with KNNStore.open(home, "a") as writing:
            writing.remove_document("a")

    assert killed_at(moment, remove)
    with KNNStore.open(home) as reader:
        assert reader.info()["trained"] == ["rows of " + name for name in (
            "law: outdated, because documents were removed",
            "the whole store: outdated, because documents were removed",
        )]  # fmt: skip
    with KNNStore.open(home, "a") as again:
        assert whole(again) == set()


def test_only_a_selection_that_reaches_all_of_them_may_show_traces(store, fitted) -> None:
    snapshot = store.view().snapshot
    law, everything = Lineage.from_snapshot(snapshot, ["law"]), Lineage.from_snapshot(snapshot)
    for selection, law_is, everything_is in [
        (Selection(), True, True),
        (Selection(domains=("news", "law")), True, False),
        (Selection(domains=("news",)), False, False),
        (Selection(tags=("final",)), False, False),
        (Selection(domains=("law",), documents=("a",)), False, False),
        (Selection().without_content("0" * 64), False, False),
    ]:
        assert (law.is_within_selection(selection), everything.is_within_selection(selection)) == (
            law_is,
            everything_is,
        )


def test_settings_that_were_derived_go_with_a_document_that_they_were_derived_from(store, writer) -> None:
    writer.add("law", "a", "b")
    derived = asdict(Lineage.from_snapshot(store.view().snapshot))
    trained = {"rows": {"rows": {}}}
    store.save_settings(SavedSettings({"temperature": 3.0}, derived=derived, trained=trained))
    writer.add("law", "c")
    assert store.settings().query == {"temperature": 3.0}
    store.remove_document("c")  # which came later
    assert store.settings().query == {"temperature": 3.0}
    store.remove_document("a")
    assert store.settings() == SavedSettings(trained=trained)
    store.save_settings(SavedSettings({"temperature": 4.0}))  # somebody's choice stays
    store.remove_document("b")
    assert store.settings().query == {"temperature": 4.0}


def test_settings_fitted_on_text_that_was_stored_go_with_it(store, writer, caplog) -> None:
    writer.add("law", "a", "b")
    (content,) = [one.content_hash for one in store.documents() if one.id == "b"]
    record = {"held_out": [content, "f" * 64]}
    store.save_settings(SavedSettings({"k": 9}, calibration=record), ("law",))
    store.save_settings(SavedSettings({"k": 8}, calibration={"held_out": ["e" * 64]}))
    store.remove_document("a")
    assert store.settings(("law",)).query == {"k": 9}
    writer.add("law", "b")  # another text in its place
    assert store.settings(("law",)) is None
    assert store.settings().query == {"k": 8}
    assert (
        "the settings calibrated for law were deleted, because documents to which they were fitted"
        in caplog.text
    )


def test_text_that_is_stored_twice_is_not_removed_with_one(store, writer) -> None:
    writer.add("law", "a")
    (content,) = [one.content_hash for one in store.documents()]
    new = [NewDocument("copy", "tax", content, np.arange(3, dtype=np.uint32))]
    with store.ingest(new) as group:
        group.add(*(np.arange(3) * n for n in (0, 1, 1)), np.zeros((3, 8), np.float32))
    store.save_settings(SavedSettings({"k": 9}, calibration={"held_out": [content]}), ("law",))
    store.remove_document("copy")
    assert store.settings(("law",)).query == {"k": 9}
    store.remove_document("a")
    assert store.settings(("law",)) is None


def test_an_adding_that_fails_takes_no_settings_with_it(store, writer) -> None:
    writer.add("law", "a")
    content = "d" * 64
    store.save_settings(SavedSettings({"k": 9}, calibration={"held_out": [content]}), ("law",))
    with pytest.raises(KeyError), store.ingest([NewDocument("x", "law", content, np.arange(3))]):
        raise KeyError
    assert store.settings(("law",)).query == {"k": 9}

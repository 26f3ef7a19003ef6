"""What a folder has comes in, what it has no more goes, and nothing goes by accident."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from knnstore.store import KNNStore, NewDocument, Selection
from tests.server.conftest import Server


@pytest.fixture
def notes(workplace):
    """A folder of which the domain notes was made once."""
    folder = Path("notes")
    (folder / "deep").mkdir(parents=True)
    for name, text in {"a.txt": "The harbour.", "b.md": "The winter.", "deep/c.txt": "The storm."}.items():
        (folder / name).write_text(text)
    return folder


def ids(knnstore, domain="notes"):
    return {row["id"] for row in knnstore(f"documents --domain {domain} --json").json}


def test_sync_makes_a_domain_what_the_folder_is(knnstore, store, notes):
    first = knnstore("sync notes --domain notes --tag t --json").json
    assert (first["added"], first["removed"]) == (3, 0)
    (notes / "a.txt").write_text("The harbour is closed.")
    (notes / "b.md").unlink()
    (notes / "deep" / "b.md").write_text("The snow.")
    planned = knnstore("sync notes --domain notes --dry-run --json").json
    assert (planned["added"], planned["replaced"], planned["removed"]) == (1, 1, 1)
    assert planned["ids"] == {
        "added": ["deep/b.md"], "renamed": [], "replaced": ["a.txt"], "described": [], "removed": ["b.md"],
    }  # fmt: skip
    assert ids(knnstore) == {"a.txt", "b.md", "deep/c.txt"}
    shown = knnstore("sync notes --domain notes --dry-run").out.splitlines()
    assert shown == ["added deep/b.md", "replaced a.txt", "removed b.md", "1 added, 1 replaced, 1 removed"]
    done = knnstore("sync notes --domain notes --json").json
    assert {name: done[name] for name in ("added", "replaced", "removed", "unchanged")} == {
        "added": 1, "replaced": 1, "removed": 1, "unchanged": 1,
    }  # fmt: skip
    assert ids(knnstore) == {"a.txt", "deep/b.md", "deep/c.txt"}
    assert knnstore("sync notes --domain notes --dry-run").out == "3 unchanged\n"
    assert ids(knnstore, "letters") == {"first.txt", "second.txt"}
    shutil.copytree(notes, "elsewhere/notes")
    again = knnstore("sync elsewhere/notes --domain notes --json").json
    assert (again["unchanged"], again["tokens"]) == (3, 0)


def test_sync_renames_what_was_moved(knnstore, store, notes, caplog):
    (notes / "rows.jsonl").write_text('{"id": "r", "text": "The boat."}\n')
    (notes / "again.md").write_text("The winter.")
    knnstore("sync notes --domain notes")
    caplog.clear()  # two texts are the same
    (notes / "again.md").unlink()
    (notes / "a.txt").rename(notes / "b.txt")
    (notes / "b.md").rename(notes / "deep" / "b.md")
    (notes / "copy.txt").write_text("The storm.")  # of a file that is still there
    (notes / "rows.jsonl").write_text('{"id": "s", "text": "The boat.", "year": 1987}\n')
    planned = knnstore("sync notes --domain notes --dry-run --json").json["ids"]
    assert planned["renamed"] == ["a.txt to b.txt", "again.md to deep/b.md", "r to s"]
    assert (planned["added"], planned["removed"]) == (["copy.txt"], ["b.md"])
    (notes / "copy.txt").unlink()
    (notes / "rows.jsonl").write_text('{"id": "s", "text": "The boat."}\n')
    done = knnstore("sync notes --domain notes --device nonsense --json").json  # no model is needed
    assert (done["renamed"], done["added"], done["removed"], done["unchanged"]) == (3, 0, 1, 1)
    assert ids(knnstore) == {"b.txt", "deep/b.md", "deep/c.txt", "s"}
    (notes / "rows.jsonl").write_text('{"id": "t", "text": "The boat.", "year": 1987}\n')
    done = knnstore("sync notes --domain notes --json").json
    assert (done["renamed"], done["tokens"]) == (1, 0)
    assert knnstore("documents --domain notes --json").json[-1]["metadata"] == {"year": 1987}
    assert caplog.messages == []
    (notes / "elsewhere.txt").write_text("The harbour.")
    (notes / "b.txt").write_bytes(b"\xff")  # which stays as it is stored
    done = knnstore("sync notes --domain notes --json").json
    assert (done["renamed"], done["added"]) == (0, 1)
    assert {"b.txt", "elsewhere.txt"} < ids(knnstore)


def test_sync_keeps_what_it_cannot_read(knnstore, store, notes):
    (notes / "rows.jsonl").write_text('{"id": "r", "text": "The boat."}\n')
    assert knnstore("sync notes --domain notes --json").json["added"] == 4
    (notes / "b.md").write_bytes(b"\xff")
    (notes / "a.txt").unlink()
    done = knnstore("sync notes --domain notes --json -v")
    assert (done.json["removed"], done.json["skipped"]) == (1, 1)
    assert "skipped notes/b.md: not UTF-8: byte 0xff at 0" in done.err
    assert ids(knnstore) == {"b.md", "deep/c.txt", "r"}
    (notes / "rows.jsonl").write_text("broken\n")
    (notes / "deep" / "c.txt").unlink()
    (notes / "new.txt").write_text("The wall.")
    done = knnstore("sync notes --domain notes --json")
    assert (done.json["removed"], done.json["added"]) == (0, 1)
    assert "warning: nothing is removed: 1 rows cannot be read" in done.err
    assert ids(knnstore) == {"b.md", "deep/c.txt", "r", "new.txt"}


def test_sync_empties_no_domain_by_accident(knnstore, store, notes):
    assert knnstore("sync notes --domain notes").status == 0
    for name in ("a.txt", "deep/c.txt"):
        (notes / name).unlink()
    refused = knnstore("sync notes --domain notes")
    assert (refused.status, refused.out) == (1, "")
    assert refused.err.startswith("error: 2 of 3 documents of notes will be removed: confirm with --yes")
    (notes / "b.md").write_text("")
    for _ in range(2):
        refused = knnstore("sync notes --domain notes --yes")
        assert (refused.status, refused.out) == (1, "")
        assert len(ids(knnstore)) == 3
        (notes / "b.md").unlink(missing_ok=True)
    (notes / "b.md").write_text("The winter.")
    assert knnstore("sync notes --domain notes --yes --json").json["removed"] == 2


def test_sync_needs_no_model_where_nothing_is_to_be_stored(knnstore, store, notes):
    assert knnstore("sync notes --domain notes").status == 0
    (notes / "a.txt").unlink()
    assert knnstore("sync notes --domain notes --device nonsense --json").json["removed"] == 1
    (notes / "b.md").write_text("Another text.")
    assert knnstore("sync notes --domain notes --device nonsense").status == 1


def test_a_folder_with_bad_files_is_added_without_them(knnstore, store, notes):
    (notes / "empty.txt").touch()
    (notes / "latin.txt").write_bytes(b"caf\xe9")
    (notes / "photo.png").write_bytes(b"\x89PNG")
    done = knnstore("add notes --domain notes --json")
    assert (done.status, done.json["added"], done.json["skipped"], done.json["ignored"]) == (0, 3, 2, 1)
    said = (
        "left out 2 unusable documents and 1 file of an unsupported type (-v names them): notes/empty.txt: "
    )
    assert done.err.startswith(said)
    assert done.json["left_out"] == {
        "another kind of file": ["notes/photo.png"],
        "empty": ["notes/empty.txt"],
        "not UTF-8": ["notes/latin.txt"],
    }
    assert "\n  empty (1): notes/empty.txt\n" in done.err
    assert "\n  not UTF-8 (1): notes/latin.txt; save as UTF-8, or give --encoding: cp1252 " in done.err
    named = knnstore("-v add notes --domain notes").err.splitlines()
    assert "skipped notes/empty.txt: the file is empty" in named
    assert "ignored notes/photo.png: files of this type are not read" in named
    assert knnstore("eval notes --json").json["skipped"] == 2


def test_what_leads_out_of_a_folder_is_left_out_and_no_longer_kept(knnstore, store, notes, tmp_path):
    key = tmp_path / "key.txt"
    key.write_text("A private key of the harbour.")
    (notes / "key.txt").write_text(key.read_text())
    assert knnstore("sync notes --domain notes --json").json["added"] == 4
    (notes / "key.txt").unlink()
    (notes / "key.txt").symlink_to(key)
    (notes / "zero.txt").symlink_to("/dev/zero")
    os.mkfifo(notes / "pipe.txt")
    done = knnstore("sync notes --domain notes --json")
    assert (done.status, done.json["removed"], done.json["skipped"]) == (0, 1, 3)
    assert done.json["left_out"] == {
        "links out of the folder, or to folders": ["notes/key.txt", "notes/zero.txt"],
        "no regular file": ["notes/pipe.txt"],
    }
    assert "key.txt" not in ids(knnstore)
    assert knnstore("add notes/key.txt --domain named --json").json["added"] == 1
    refused = knnstore("add notes/pipe.txt --domain named")
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert refused.err.startswith("error: notes/pipe.txt: not a regular file: it is a pipe (FIFO)")


WRITERS = {
    "sync": "sync notes --domain notes",  # where nothing differs
    "add": "add notes/a.txt --domain other",
    "remove": "remove n-17",
    "serve": None,
}


@pytest.mark.parametrize(
    ("writer", "moment"),
    [
        *(("sync", moment) for moment in ("purge.before", "purge.deleted", "purge.flushed")),
        *(pytest.param(one, "purge.deleted", marks=pytest.mark.slow) for one in WRITERS if one != "sync"),
    ],
)
def test_what_a_killed_sync_removed_is_read_no_more_and_the_next_writer_ends_it(
    knnstore, store, notes, killed_at, writer, moment
):
    knnstore("sync notes --domain notes")
    chosen = Selection(domains=("notes",))
    with KNNStore.open(store) as reader:  # open since before the removal
        tokens, gone = sum(reader.lengths().values()), len(reader.tokens("b.md"))
        assert len(reader.ngrams(chosen).text.firsts) == 3
        (notes / "b.md").unlink()
        assert killed_at(moment, lambda: knnstore("sync notes --domain notes"))
        with KNNStore.open(store) as later:
            for one in (reader, later):
                assert [document.id for document in one.select(chosen)] == ["a.txt", "deep/c.txt"]
                assert (
                    sum(one.lengths().values())
                    == sum(domain.tokens for domain in one.domains())
                    == tokens - gone
                )
                assert one.token_counts().sum() == tokens - gone
                assert len(one.ngrams(chosen).text.firsts) == 2
                found = one.search(np.zeros((1, one.identity.dim), np.float32), 1000).ids
                assert (found >= 0).sum() == one.record_count() == tokens - gone
            assert any("half removed" in line for line in later.verify())
    if WRITERS[writer] is None:
        server = Server(store)
        server.ready().end()
        server.close()
    else:
        assert knnstore(WRITERS[writer]).status == 0
    with KNNStore.open(store) as reader:
        assert reader.verify() == []
        assert not reader.has_unsettled_documents()


def test_a_sync_without_differences_passes_beside_a_writer(knnstore, store, notes):
    knnstore("sync notes --domain notes")
    added = NewDocument("d", "other", "0" * 64, np.zeros(2, np.uint32))
    with KNNStore.open(store, "a") as writer, writer.ingest([added]):
        assert writer.has_unsettled_documents()
        assert knnstore("sync notes --domain notes --json").json["unchanged"] == 3


def test_many_unusable_rows_are_named_with_what_is_wrong(knnstore, store, notes):
    (notes / "rows.jsonl").write_text('{"body": "x"}\n' * 8 + '{"text": "The wall."}\n')
    done = knnstore("add notes --domain notes --json")
    assert (done.json["added"], len(done.json["left_out"]["unusable"])) == (4, 8)
    lines = done.err.splitlines()
    assert lines[1] == "  unusable (8):"
    assert lines[2].startswith(
        "    notes/rows.jsonl row 1: no 'text', the fields are 'body': name the field of"
    )
    assert lines[7] == "    3 more"


def test_files_in_another_encoding(knnstore, store):
    Path("latin.csv").write_bytes("id;text\n1;Die Mauer am Hafen, so schön.\n".encode("cp1252"))
    refused = knnstore("add latin.csv --domain d")
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert "not UTF-8: byte 0xf6 at 28 of line 2; save it as UTF-8, or give --encoding cp1252" in refused.err
    assert knnstore("add latin.csv --domain d --encoding cp1252 --json").json["added"] == 1
    assert "schön" in knnstore("show 1").out or knnstore("documents --domain d --json").json
    refused = knnstore("add latin.csv --domain d --encoding nonsense")
    assert refused.err.startswith("error: there is no encoding 'nonsense'")


def test_a_text_that_is_stored_under_another_id_is_told(knnstore, store, notes, caplog):
    knnstore("add notes --domain notes")
    knnstore("add notes --domain other")
    assert caplog.messages == []
    (notes / "deep" / "c.txt").rename(notes / "deep" / "d.txt")
    knnstore("add notes --domain notes")
    (said,) = caplog.messages
    assert said.startswith(
        "1 of these texts are also stored in notes under another id, such as 'deep/d.txt' as 'deep/c.txt'"
    )


def test_several_documents_are_removed_or_none(knnstore, store):
    planned = knnstore("remove n-17 n-18 --dry-run --json").json["would_remove"]
    assert (planned["ids"], planned["documents"]) == (["n-17", "n-18"], 2)
    assert knnstore("remove n-17 nothing").status == 1
    assert knnstore("remove n-17 --domain letters").status == 1
    assert ids(knnstore, "news") == {"n-17", "n-18", "n-19"}
    assert knnstore("remove n-17 n-18 --domain news --json").json["removed"] == planned
    assert ids(knnstore, "news") == {"n-19"}


def test_documents_are_removed_by_tag(knnstore, store):
    knnstore("tag n-18 --add final")
    refused = knnstore("remove --tag nothing")
    assert (refused.status, refused.err) == (1, "error: no selected document has the tag 'nothing'\n")
    planned = knnstore("remove --tag final --dry-run").out.splitlines()
    assert planned[:3] == ["first.txt of letters", "second.txt of letters", "n-18 of news"]
    assert planned[3].startswith("would remove 3 documents: ")
    assert knnstore("remove --tag final --domain news --json").json["removed"]["ids"] == ["n-18"]
    assert knnstore("remove --tag final --json").json["removed"]["documents"] == 2
    assert {row["name"] for row in knnstore("domains --json").json} == {"news"}

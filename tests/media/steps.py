"""Does to stores what it reads from stdin, each step in a process of its own; replies how that ended.

A step is forked, so importing everything costs once, and an end by a signal is the step's alone.
"""

import json
import os
import sqlite3
import sys
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

import knnstore
import knnstore.cli.root  # so that no step imports it again
import knnstore.space
from knnstore.catalog import Identity, NewDocument
from knnstore.cli import main
from knnstore.datastore import registry, tokens_from_ids
from knnstore.errors import KnnstoreError
from knnstore.store import KNNStore, Selection

DIM = 64
ENGINES: dict[str, dict[str, Any]] = {
    "faiss": {"index": "IVF4,Flat"},
    "hnswlib": {"exact_up_to": 100},
    "cells": {"cells": 4},
}
IDENTITY = Identity("none", "0" * 64, "0" * 64, "key", DIM, "l2", 1000, 16, 8)


def of_document(id: str, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and keys, the same each time for an id."""
    rng = np.random.default_rng(list(id.encode()))
    keys = rng.standard_normal((tokens, DIM)).astype(np.float16).astype(np.float32)
    return rng.integers(0, 1000, tokens), keys


def create(home: str, engine: str, *, location: str | None = None, umask: int | None = None) -> None:
    if umask is not None:
        os.umask(umask)
    KNNStore.create(home, IDENTITY, store=engine, params=ENGINES[engine], location=location).close()


def open_to_others(home: str, tokens: int, umask: int) -> None:
    """Do much, and print the files that others can get at, also while it is done."""
    os.umask(umask)
    with knnstore.open(home, "a") as store:
        store.save_weights({"w": np.zeros(3)}, {})
    add(home, "x", ["a"], tokens)
    seen: set[Path] = set()
    with knnstore.open(home, "a") as store, knnstore.open(home) as reader:
        store.optimize()
        store.retag("a", add=["t"])
        reader.search(of_document("a", tokens)[1][:1], 1)
        Path(home).joinpath("catalog.db-wal").stat()
        places = [Path(home)]
        while places:
            place = places.pop()
            if place.stat().st_mode & 0o077:
                seen.add(place)
            elif place.is_dir():
                places += place.iterdir()
    print("seen:", *seen)


def add_many(home: str, domain: str, count: int, title: int) -> None:
    """Add documents of a few tokens in one commit, each with a title of so many letters."""
    gold, keys = of_document("many", 4)
    many = [
        NewDocument(f"{domain}-{at}", domain, "0" * 64, gold.astype(np.uint32), {"title": f"{at:0{title}}"})
        for at in range(count)
    ]
    with knnstore.open(home, "a") as store, store.ingest(many) as group:
        for at in range(count):
            group.add(np.full(4, at), np.arange(4), gold, keys)


def erase(home: str, temporary: str | None = None) -> None:
    """Erase, with SQLite's temporary files in a folder."""
    if temporary is not None:
        os.environ["SQLITE_TMPDIR"] = temporary
    command("erase", "--home", home)


def add(home: str, domain: str, ids: list[str], tokens: int, *, unchecked: bool = False) -> None:
    """Add documents, a commit each; prints each id once it is acknowledged."""
    if unchecked:  # as when something else fills the disk after the look at it
        knnstore.space.MARGIN = -(1 << 60)
    with knnstore.open(home, "a") as store:
        for id in ids:
            gold, keys = of_document(id, tokens)
            document = NewDocument(id, domain, "0" * 64, gold.astype(np.uint32))
            with store.ingest([document]) as group:
                group.add(np.zeros(tokens, np.int64), np.arange(tokens), gold, keys)
            print(id, flush=True)


def optimize_unchecked(home: str) -> None:
    """Build indexes, as when something else fills the disk after the look at it."""
    knnstore.space.MARGIN = -(1 << 60)
    with knnstore.open(home, "a") as store:
        store.optimize()


def fill_and_remove(home: str, *ids: str) -> None:
    """Remove documents with a store that is open; before each removal something fills the disk."""
    with knnstore.open(home, "a") as store:
        for id in ids:
            fill(Path(home).parent)
            store.remove_document(id)


def age(home: str) -> None:
    """Give a home's database the schema of an earlier release, which had no digests."""
    with closing(sqlite3.connect(Path(home) / "catalog.db")) as database:
        for table in ("store", "documents", "document_tokens", "settings"):
            database.execute(f"ALTER TABLE knnstore_{table} DROP COLUMN digest")
        columns = "document_id INTEGER PRIMARY KEY, records INTEGER, scale DOUBLE, survivors BLOB"
        database.execute("DROP TABLE knnstore_leases")
        database.execute("DROP TABLE knnstore_withdrawals")
        database.execute(f"CREATE TABLE knnstore_document_pruned ({columns})")
        database.execute("UPDATE knnstore_alembic_version SET version_num = '0007'")
        database.commit()
        database.execute("VACUUM")


def fill(disk: Path) -> None:
    with (disk / "filling").open("ab", 0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def check(home: str, tokens: int, *, full: bool = False) -> None:
    """Compare all that can be read with what it must be; prints the ids.

    On a full disk something may be half done: it is left to a writer who finds room.
    """
    with knnstore.open(home) as store:
        problems = [line for line in store.verify() if not (full and "half added or half removed" in line)]
        assert not problems, problems
        for document in store.documents():
            gold, keys = of_document(document.id, tokens)
            assert (store.tokens(document.id, domain=document.domain) == gold).all(), document.id
            found = store.search(keys[:5], 1, Selection(domains=(document.domain,)))
            assert (tokens_from_ids(found.ids[:, 0]) == gold[:5]).all(), document.id
            assert (found.distances[:, 0] < 1e-2).all(), document.id
            print(document.id)


def command(*arguments: str, unchecked: bool = False) -> None:
    """Run the command line."""
    if unchecked:  # see `add`
        knnstore.space.MARGIN = -(1 << 60)
    sys.argv = ["knnstore", *arguments]
    main()


STEPS: dict[str, Callable[..., None]] = {
    "create": create,
    "add": add,
    "add_many": add_many,
    "erase": erase,
    "optimize_unchecked": optimize_unchecked,
    "open_to_others": open_to_others,
    "fill_and_remove": fill_and_remove,
    "age": age,
    "check": check,
    "command": command,
}


def run(name: str, arguments: list[Any], options: dict[str, Any], output: Path) -> int:
    """Do a step in a child; returns its exit status, negative when a signal ended it."""
    child = os.fork()
    if child == 0:
        for descriptor, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(output / stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        status = 0
        try:
            STEPS[name](*arguments, **options)
        except KnnstoreError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
            status = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    registry.load_adapter("faiss")  # so that no step imports it again
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        name, arguments, options = json.loads(line)
        status = run(name, arguments, options, folder)
        said = {stream: (folder / stream).read_text() for stream in ("out", "err")}
        print(json.dumps({"status": status, **said}), flush=True)

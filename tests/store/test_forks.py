"""A process that forks while a store is open: the child does not close the store of its parent."""

import subprocess
import sys
from pathlib import Path

from knnstore.store import KNNStore

PROGRAM = """
import multiprocessing, os, sys
from knnstore.errors import LockedError
from knnstore.store import KNNStore

home = sys.argv[1]


def check_open(store):
    try:
        KNNStore.open(home, "a")
    except LockedError:
        store.retag("1", add=[str(store.revision())])
        assert store.verify() == []
        return
    sys.exit("the lock was released")


def count_documents(_):
    return len(list(store.documents()))


# 1) Children leave the `with` block, close the store, read it in a worker process, or end with the program.
with KNNStore.open(home, "a") as store:
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    check_open(store)
    if os.fork() == 0:
        store.close()  # does nothing
        os._exit(count_documents(0) != 2)
    assert os.wait()[1] == 0
    check_open(store)
    with multiprocessing.get_context("fork").Pool(2) as workers:
        assert workers.map(count_documents, range(4)) == [2] * 4
    check_open(store)
store = KNNStore.open(home, "a")
if os.fork() == 0:
    sys.exit(0)
os.wait()
check_open(store)
# 2) A child that lives on does not keep the lock that its parent releases.
reading, writing = os.pipe()
if os.fork() == 0:
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)
store.close()
KNNStore.open(home, "a").close()
os.close(writing)
os.wait()
"""


def test_a_forked_child_leaves_the_store_of_its_parent_open(store, writer, home: Path) -> None:
    writer.add("law", "1", "2")
    store.close()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(home)], capture_output=True, check=False, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    with KNNStore.open(home) as read:
        assert len(next(document for document in read.documents() if document.id == "1").tags) == 4

"""Kill a writer at every failpoint, one process each, and read what is left; run by test_segments.py.

A process of its own, because it forks: nothing here has started a thread.
"""

import json
import os
import re
import shutil
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from knnstore import durable, failpoints
from knnstore.datastore.arrays import Metric
from knnstore.datastore.embedded import files
from knnstore.datastore.embedded import log as segments
from knnstore.datastore.embedded import manifest as manifests
from knnstore.datastore.embedded.codecs import Coding
from knnstore.datastore.embedded.log import KeySegments
from knnstore.datastore.embedded.manifest import Manifest
from knnstore.datastore.ranges import IdRanges

SOURCE = "".join(Path(module.__file__).read_text() for module in (durable, files, segments))
NAMES = sorted(
    {
        *re.findall(r'failpoint\("([\w.]+)"\)', SOURCE),
        "segments.manifest.written",
        "segments.manifest.renamed",
    }
)
STEPS = 5
manifests.PART_SIZE = 1


CODING = Coding("int8", 10, 22) if sys.argv[2] == "coded" else None  # as groups grow, the rest at the end


def opened(root: Path) -> KeySegments:
    return KeySegments(root, 2, Metric.L2, "a", CODING)


def work(store: KeySegments, step: int) -> None:
    """Change the store; each step ends durable."""
    ids = np.arange(step * 10, step * 10 + 20)  # half of them replace the former step's
    keys = np.repeat(ids[:, None], 2, axis=1).astype(np.float32) + step
    store.append(ids, keys, np.full(20, step % 2, np.int32))
    store.delete(IdRanges([(step * 10 + 3, step * 10 + 6)]))
    if step == STEPS - 1:
        segment = next(s for s in store.snapshot() if s.entry)
        store.write_index(segment, lambda path: path.write_bytes(b"index"), {})
        store.compact(ratio=4)
    else:
        store.flush()


def state(root: Path) -> dict[int, tuple[float, int]]:
    """Everything in the store, after a writer has recovered it and with all checksums right."""
    with closing(opened(root)) as store:
        assert store.verify() == []
        named = Manifest.read(root).file_names()
        assert named == {f"{p.parent.name}/{p.name}" for p in root.glob("*/*")}, "leaked files"
        return {
            i: (round(key, 3), group)  # codes round
            for ids, keys, groups in store.iterate(ids=None, batch_size=1000)
            for i, key, group in zip(ids.tolist(), keys[:, 0].tolist(), groups.tolist(), strict=True)
        }


def trial(root: Path, expected: list[dict[int, tuple[float, int]]], specification: str) -> bool:
    """Run a writer that is killed somewhere; True if it was."""
    progress = root.with_suffix(".progress")
    progress.write_text("0")
    child = os.fork()
    if child == 0:
        failpoints.arm(specification)
        store = opened(root)
        for step in range(STEPS):
            work(store, step)
            progress.write_text(str(step + 1))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    done = int(progress.read_text())
    if not root.exists():
        assert done == 0
        return True
    found = state(root)
    assert found in expected[done : done + 2], f"{specification}: after {done} steps"
    return os.WIFSIGNALED(status)


def main(base: Path) -> None:
    """Kill at each passage of each failpoint until the writer survives."""
    expected: list[dict[int, tuple[float, int]]] = [{}]
    for steps in range(1, STEPS + 1):
        with closing(opened(base / f"model{steps}")) as store:
            for step in range(steps):
                work(store, step)
        expected.append(state(base / f"model{steps}"))
    killed = []
    for name in NAMES:
        passage = 1
        while trial(base / "store", expected, f"{name}:{passage}"):
            shutil.rmtree(base / "store", ignore_errors=True)
            killed.append(f"{name}:{passage}")
            passage += 1
        assert passage > 1, f"{name} was never passed"
        shutil.rmtree(base / "store")
    print(json.dumps(killed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

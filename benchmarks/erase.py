"""What erasing costs: a document or a domain that was removed, among many records.

    python benchmarks/erase.py --rows 100000 1000000 --engine faiss hnswlib
    python benchmarks/erase.py --smoke                a few seconds

JSON goes to stdout, a line for each case to stderr. Each store holds ten domains of equal size with synthetic
clustered keys. Seconds are those of `KNNStore.erase` after the removal, which they do not include.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from move import fill
from search import clustered

from knnstore.store import KNNStore

DOMAINS = 10


def erased(home: Path, what: str) -> dict[str, float]:
    """Remove a document or a domain, and erase it; returns seconds and sizes."""
    with KNNStore.open(home, "a") as store:
        domain = store.domains()[DOMAINS // 2].name
        start = time.perf_counter()
        if what == "document":
            store.remove_document(store.documents(domain=domain)[0].id, domain=domain)
        else:
            store.remove_domain(domain)
        removed = time.perf_counter() - start
        done = store.erase()
        start = time.perf_counter()
        store.erase()
        return {
            "records": done.records,
            "remove_seconds": round(removed, 3),
            "erase_seconds": round(done.seconds, 3),
            "nothing_to_erase_seconds": round(time.perf_counter() - start, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000], help="records of a store")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--engine", nargs="+", default=["faiss"])
    parser.add_argument("--smoke", action="store_true", help="small, and nothing can be concluded from it")
    given = parser.parse_args()
    if given.smoke:
        given.rows, given.dim = [5_000], 16
    results = []
    for rows in given.rows:
        keys = clustered(rows, given.dim, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            fill(Path(folder) / "home", keys, DOMAINS)
            for engine in given.engine:
                home = Path(folder) / engine
                shutil.copytree(Path(folder) / "home", home)
                if engine != "faiss":
                    with KNNStore.open(home, "a") as store:
                        store.move(engine, "moved")
                for what in ("document", "domain"):
                    copy = Path(folder) / f"{engine}-{what}"
                    shutil.copytree(home, copy)
                    result = {"engine": engine, "what": what, "dim": given.dim, **erased(copy, what)}
                    results.append(result)
                    print(result, file=sys.stderr)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()

"""A writer in a process of its own, which the conformance kit kills.

The kit runs this file as a script: the first argument says in JSON what to open; then each line on stdin
is one step, answered by a line on stdout when it is done.
"""

import json
import sys
from pkgutil import resolve_name

import numpy as np

from knnstore.datastore import Datastore, IdRanges, Metric


def main() -> None:
    """Open the store, say so, and obey until killed or stdin ends."""
    job = json.loads(sys.argv[1])
    datastore_class: type[Datastore] = resolve_name(job["datastore"])
    with np.load(job["records"]) as records:
        ids, keys, groups = records["ids"], records["keys"], records["groups"]
    store = datastore_class.open(
        job["location"], dim=job["dim"], metric=Metric(job["metric"]), mode="a", **job["params"]
    )
    print("opened", flush=True)
    for line in sys.stdin:
        step, *bounds = line.split()
        rows = slice(*map(int, bounds)) if bounds else slice(0)
        if step == "add":
            store.add(ids[rows], keys[rows], groups[rows])
        elif step == "delete":
            store.delete(IdRanges.of_ids(ids[rows]))
        elif step == "flush":
            store.flush()
        print(step, flush=True)


if __name__ == "__main__":
    main()

"""A writer in a process of its own, which the conformance kit kills.

The kit runs this file as a script: the first argument says in JSON what to open; then each line on stdin
is one step, answered by a line on stdout when it is done.
"""

import importlib
import json
import sys
from functools import reduce
from typing import Any

import numpy as np

from knnstore.datastore import Datastore, IdRanges, Metric


def main() -> None:
    """Open the store, say so, and obey until killed or stdin ends."""
    job = json.loads(sys.argv[1])
    module: Any = importlib.import_module(job["module"])
    datastore_class: type[Datastore] = reduce(getattr, job["qualname"].split("."), module)
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

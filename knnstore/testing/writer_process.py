"""A process that writes to a store, which the conformance kit starts and kills.

The kit runs this file as a script. The first argument describes in JSON the store to open. Each line on stdin
is a step; when the step is done, the process answers with a line on stdout.
"""

import json
import sys
from pkgutil import resolve_name

import numpy as np

from knnstore.datastore import Datastore, IdRanges, Metric


def main() -> None:
    """Open the store that the first argument describes, print "opened", and do the steps on stdin."""
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
            store.delete(IdRanges.from_ids(ids[rows]))
        elif step == "flush":
            store.flush()
        print(step, flush=True)


if __name__ == "__main__":
    main()

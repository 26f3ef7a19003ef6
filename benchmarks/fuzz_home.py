"""Damages homes in every way and opens them: each ends in an answer, or in an error that knnstore means.

    python benchmarks/fuzz_home.py [--mutations 10000] [--seed 0] [--engine faiss]
    python benchmarks/fuzz_home.py --replay faiss:17
    python benchmarks/fuzz_home.py --smoke          a few seconds

A mutation changes one file (bits, length, blocks, exchanged for another) or one value (in the catalog's
rows, in a JSON file, whose checksum is then made anew, as an attacker would). Then the home is listed,
searched, read and verified. Found is: an exception that is none of knnstore's, the end of the process or
no end, and an answer that differs from the undamaged home's while `verify` is content. What no checksum
covers is not compared: names, tags, metadata, times and settings in the catalog. Exit status 1 when
anything was found; JSON goes to stdout.
"""

import argparse
import json
import random
import select
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from knnstore.catalog import Identity, NewDocument
from knnstore.errors import KnnstoreError
from knnstore.store import KNNStore, SavedSettings, Selection

DIM, VOCABULARY = 8, 1000
ENGINES: dict[str, dict[str, Any]] = {
    "faiss": {"index": "IVF4,Flat", "nprobe": 4},
    "hnswlib": {"exact_up_to": 1, "ef": 400},
    "qdrant": {},
}
SHARES = {"faiss": 0.45, "hnswlib": 0.45, "qdrant": 0.1}  # of the mutations; Qdrant's files are large
IDENTITY = Identity("none", "0" * 64, "0" * 64, "key", DIM, "l2", VOCABULARY, 16, 8)
ODD = [
    "", "\0", "\x1b]52;c;aGk=\x07", "\u202e", "\udcff", "../../etc", "/", "a" * 100_000, "[" * 5000, "null",
    "{}", b"", b"\xff\xfe\x00", bytes(1000), -1, 0, 1, 2**31, 2**63 - 1, -(2**63), 1e308, -1e-320, None,
    '{"a":' * 3000 + "1" + "}" * 3000, "[1]", "NaN", "2026-99-99 00:00:00.000000", "live",
    "http://127.0.0.1:9",
]  # fmt: skip
JSON_ODD = [
    "",
    "\0",
    "\udcff",
    "../..",
    -1,
    0,
    1.5,
    2**70,
    None,
    [],
    {},
    [[]],
    True,
    "a" * 10_000,
    {"a": {"b": []}},
]
_SECONDS = 120  # without an answer is no answer


def make(home: Path, engine: str) -> None:
    """A small store with all that one may have: two domains, tags, settings, weights, pruned documents."""
    rng = np.random.default_rng(0)
    with KNNStore.create(home, IDENTITY, store=engine, params=ENGINES[engine]) as store:
        for domain, sizes in (("law", (40, 30, 30)), ("news", (25, 25))):
            new = [
                NewDocument(
                    f"{domain}-{at}",
                    domain,
                    f"{at:064x}",
                    rng.integers(0, VOCABULARY, size).astype(np.uint32),
                    metadata={"year": at, "names": ["a", "b"]},
                    tags=frozenset({"odd"} if at % 2 else ()),
                )
                for at, size in enumerate(sizes)
            ]
            with store.ingest(new) as group:
                for at, document in enumerate(new):
                    size = len(document.tokens)
                    keys = rng.standard_normal((size, DIM)).astype(np.float16).astype(np.float32)
                    group.add(np.full(size, at), np.arange(size), document.tokens.astype(np.int64), keys)
        store.optimize()
        store.save_settings(SavedSettings({"k": 4}))
        weights = store.save_weights({"a": np.ones(4, np.float32)}, {"model": "x"})
        store.save_settings(SavedSettings({"mixer": {"name": "gate", "weights": weights}}), ["law"])


def look(home: Path) -> tuple[dict[str, Any], list[str]]:
    """What a home answers, an error in place of what it does not, and what `verify` says."""
    answers: dict[str, Any] = {}
    queries = np.random.default_rng(1).standard_normal((4, DIM)).astype(np.float32)

    def ask(name: str, question: Callable[[], Any]) -> Any:
        try:
            answers[name] = question()
        except KnnstoreError as error:
            answers[name] = error
        return answers[name]

    store = ask("open", lambda: KNNStore.open(home))
    if isinstance(store, KnnstoreError):
        return answers, [str(store)]
    answers["open"] = None
    with store:
        ask("search", lambda: found(store, queries, Selection()))
        ask("tokens", lambda: {n: store.text(n).tolist() for n in store.lengths()})
        ask("counts", lambda: np.trim_zeros(store.token_counts(), "b").tolist())
        ask("records", lambda: [(r.ids.tolist(), r.keys.tolist()) for r in store.records()])
        for name, question in (
            ("~domains", store.domains),
            ("~documents", store.documents),
            ("~info", store.info),
            ("~settings", lambda: [store.settings(), store.settings(["law"])]),
            ("~law", lambda: found(store, queries, Selection(domains=("law",)))),
            ("~odd", lambda: found(store, queries, Selection(tags=("odd",)))),
            ("~one", lambda: store.tokens("law-1", domain="law").tolist()),
            ("~where", lambda: store.provenance(store.search(queries, 2).ids.ravel())),
        ):
            ask(name, question)
        problems = ask("~verify", store.verify)
    return answers, [str(problems)] if isinstance(problems, KnnstoreError) else problems


def found(store: KNNStore, queries: Any, selection: Selection) -> Any:
    neighbors = store.search(queries, 5, selection)
    weights = None if neighbors.log_weights is None else neighbors.log_weights.tolist()
    return neighbors.ids.tolist(), neighbors.distances.tolist(), weights


# -- mutations


def mutate(home: Path, rng: random.Random) -> str:
    """Change one thing; returns what."""
    kind = rng.choice(["file"] * 5 + ["catalog page"] * 2 + ["row"] * 4 + ["json"] * 2)
    if kind == "row":
        return row(home / "catalog.db", rng)
    if kind == "json":
        return description(rng.choice(sorted(path for path in home.rglob("*.json") if path.is_file())), rng)
    files = sorted(path for path in home.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    path = home / "catalog.db" if kind == "catalog page" else rng.choice(files)
    content = bytearray(path.read_bytes())
    size = len(content)
    at = rng.randrange(size) if size else 0
    if size and rng.random() < 0.3:
        at = min(at, rng.randrange(128))  # headers
    how = rng.choice(
        ["bit", "bit", "truncated", "extended", "zeroed", "random", "exchanged", "emptied", "removed"]
    )
    if how == "bit" and size:
        content[at] ^= 1 << rng.randrange(8)
    elif how == "truncated":
        del content[at:]
    elif how == "extended":
        content += rng.randbytes(rng.choice([1, 512, 4096]))
    elif how in ("zeroed", "random"):
        end = min(size, at + rng.choice([1, 8, 64, 4096]))
        content[at:end] = bytes(end - at) if how == "zeroed" else rng.randbytes(end - at)
    elif how == "exchanged":
        content[:] = rng.choice(files).read_bytes()
    elif how == "emptied":
        content.clear()
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(content)
    return f"{path.relative_to(home)} {how} at {at} of {size}"


def row(catalog: Path, rng: random.Random) -> str:
    """Change a value of the catalog."""
    with sqlite3.connect(catalog) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        tables = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        table = rng.choice(sorted(name for name in tables if name.startswith("knnstore")))
        columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
        column = rng.choice(columns)
        rows = [number for (number,) in connection.execute(f"SELECT rowid FROM {table} ORDER BY rowid")]
        value = rng.choice(ODD)
        if rows:
            try:
                chosen = rng.choice(rows)
                old = connection.execute(
                    f"SELECT {column} FROM {table} WHERE rowid = ?", [chosen]
                ).fetchone()[0]
                if rng.random() < 0.4 and isinstance(old, int):
                    value = old + rng.choice([-1, 1, 2, 100, -1000])
                elif rng.random() < 0.4 and isinstance(old, bytes) and old:
                    at = rng.randrange(len(old))
                    value = old[:at] + bytes([old[at] ^ 1 << rng.randrange(8)]) + old[at + 1 :]
                elif rng.random() < 0.3 and isinstance(old, str) and old[:1] in "[{" and old:
                    value = json.dumps(changed(json.loads(old), rng))
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", [value, chosen])
            except (sqlite3.Error, UnicodeEncodeError, OverflowError):
                return "nothing"
    connection.close()
    return f"{table}.{column} = {value!r:.60}"


def description(path: Path, rng: random.Random) -> str:
    """Change a value of a JSON file, and the checksum that covers it."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return "nothing"
    if isinstance(content, dict) and "sha256" in content and "content" in content:
        inner = changed(content["content"], rng)
        text = json.dumps(inner, sort_keys=True, separators=(",", ":"))
        path.write_text(f'{{"sha256":"{sha256(text.encode()).hexdigest()}","content":{text}}}')
    else:
        path.write_text(json.dumps(changed(content, rng)))
    return f"{path.name} changed"


def changed(value: Any, rng: random.Random) -> Any:
    """Change one part of a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {key: part for key, part in value.items() if key != name}
        return {**value, name: changed(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], changed(value[at], rng), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 7, 1000, -1000])
    return rng.choice(JSON_ODD)


# -- one child runs many, and its end is a finding


def judge(template: Path, home: Path, seed: str, sound: dict[str, Any]) -> dict[str, str]:
    """Mutate a copy of a home and say what came of it."""
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(template, home)
    what = mutate(home, random.Random(seed))
    try:
        answers, problems = look(home)
    except BaseException as error:  # a panic of an engine is none of Exception
        where = traceback.extract_tb(error.__traceback__)[-1]
        lines = "".join(traceback.format_exception(error)[-6:])
        return {"what": what, "found": f"{type(error).__name__} at {Path(where.filename).name}", "why": lines}
    wrong = [
        name for name, answer in answers.items()
        if name[0] != "~" and not isinstance(answer, KnnstoreError) and answer != sound[name]
    ]  # fmt: skip
    if wrong and not problems:
        return {"what": what, "found": f"another {wrong[0]}, verify is content", "why": ""}
    long = [
        str(a) for a in answers.values() if isinstance(a, KnnstoreError) and ("\n" in str(a) or not str(a))
    ]
    if long:
        return {"what": what, "found": "an error of several lines", "why": long[0]}
    refused = any(isinstance(answer, KnnstoreError) for answer in answers.values())
    return {"what": what, "outcome": "refused" if refused else "contradicted" if problems else "the same"}


def child(template: Path, home: Path, engine: str) -> None:
    """Judge each number of a mutation that comes."""
    sound, problems = look(template)
    assert not problems, problems
    for line in sys.stdin:
        print(json.dumps(judge(template, home, f"{engine}:{line.strip()}", sound)), flush=True)


def run(folder: Path, engine: str, numbers: Iterable[int]) -> Iterator[dict[str, str]]:
    """Judge mutations in a child, and in another when that one ends."""
    template, home = folder / engine, folder / f"{engine}-mutated"
    command = [sys.executable, __file__, "--child", str(template), str(home), engine]
    worker = None
    errors = (folder / f"{engine}-errors").open("w+")
    for number in numbers:
        if worker is None:
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(f"{number}\n")
        worker.stdin.flush()
        ready, _, _ = select.select([worker.stdout], [], [], _SECONDS)
        line = worker.stdout.readline() if ready else ""
        seed = {"seed": f"{engine}:{number}"}
        if line:
            yield seed | json.loads(line)
            continue
        if not ready:
            worker.kill()
        end = f"ended with {worker.wait()}" if ready else f"did not end in {_SECONDS} s"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(template, home)
        yield seed | {"what": mutate(home, random.Random(seed["seed"])), "found": end, "why": ""}
        worker = None
    if worker is not None:
        worker.communicate()
    errors.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutations", type=int, default=10_000, help="in all, shared by the engines")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--replay", metavar="ENGINE:NUMBER")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        template, home, engine = options.child
        child(Path(template), Path(home), engine)
        return
    engines, first = options.engine or list(ENGINES), options.first
    wanted = 30 if options.smoke else options.mutations
    shares = {engine: SHARES[engine] / sum(map(SHARES.__getitem__, engines)) for engine in engines}
    counts = {engine: round(wanted * share) for engine, share in shares.items()}
    if options.replay:
        name, number = options.replay.split(":")
        engines, first, counts = [name], int(number), {name: 1}
    started, outcomes, findings = time.perf_counter(), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="knnstore-fuzz-", dir=shared_memory()) as folder:

        def judged(engine: str) -> None:
            for result in run(Path(folder), engine, range(first, first + counts[engine])):
                outcomes[result.get("outcome", "found")] += 1
                if "found" in result:
                    findings.append(result)
                    print(f"{result['seed']}: {result['what']}: {result['found']}", file=sys.stderr)
                if options.replay:
                    print(json.dumps(result, indent=2), file=sys.stderr)

        for engine in engines:
            make(Path(folder) / engine, engine)
        with ThreadPoolExecutor() as threads:
            list(threads.map(judged, engines))
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"seconds": seconds, "outcomes": outcomes, "findings": findings}, indent=2))
    sys.exit(bool(findings))


def shared_memory() -> str | None:
    """Where files need no disk, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()

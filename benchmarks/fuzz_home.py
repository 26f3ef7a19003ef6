"""Damages homes in every way and opens them: each ends in an answer, or in an error that knnstore means.

    python benchmarks/fuzz_home.py [--mutations 10000] [--first 0] [--engine faiss]
    python benchmarks/fuzz_home.py --grid           every damage to every kind of file
    python benchmarks/fuzz_home.py --replay faiss:17
    python benchmarks/fuzz_home.py --smoke          a few seconds

A mutation changes one file (bits, length, blocks, exchanged for another) or one value (in the catalog's
rows, in a JSON file, whose checksum is then made anew, as an attacker would). Then the home is listed,
searched, read and verified. Found is: an exception that is none of knnstore's, the end of the process or
no end, and an answer that differs from the undamaged home's while `verify` is content. What no checksum
covers is not compared: names, tags, metadata, times and settings in the catalog, nor what is found with other
parameters of the engine.

With --grid a file of each kind is missing, emptied, cut short, altered, exchanged for another of its kind,
a folder and a pipe, one after the other; then a writer repairs the home, and where it is content, every
answer must be that of the undamaged home. Exit status 1 when anything was found; JSON goes to stdout.
"""

import argparse
import json
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzzing.homes import ENGINES, look, make
from fuzzing.judging import judge, spoil
from fuzzing.mutations import grid

SHARES = {"faiss": 0.5, "hnswlib": 0.5}  # of the mutations
_SECONDS = 120  # without an answer is no answer


def child(template: Path, home: Path, engine: str) -> None:
    """Judge each number of a mutation that comes."""
    sound, problems = look(template)
    assert not problems, problems
    for line in sys.stdin:
        print(json.dumps(judge(template, home, f"{engine}:{line.strip()}", sound)), flush=True)


def run(folder: Path, engine: str, numbers: Iterable[str]) -> Iterator[dict[str, str]]:
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
        seed = f"{engine}:{number}"
        if line:
            yield {"seed": seed} | json.loads(line)
            continue
        if not ready:
            worker.kill()
        end = f"ended with {worker.wait()}" if ready else f"did not end in {_SECONDS} s"
        yield {"seed": seed, "what": spoil(template, home, seed), "found": end, "why": ""}
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
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="of the grid; 4 leaves out three of four")
    parser.add_argument("--replay", metavar="SEED")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        template, home, engine = options.child
        child(Path(template), Path(home), engine)
        return
    engines = options.engine or (list(ENGINES) if options.grid else list(SHARES))
    if options.replay:
        engines = [options.replay.partition(":")[0]]
    started, outcomes, findings = time.perf_counter(), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="knnstore-fuzz-", dir=shared_memory()) as folder:

        def judged(engine: str) -> None:
            for result in run(Path(folder), engine, numbers_of(options, engine, engines, Path(folder))):
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


def numbers_of(options: argparse.Namespace, engine: str, engines: list[str], folder: Path) -> list[str]:
    """Which mutations of an engine are to be judged."""
    if options.replay:
        return [options.replay.partition(":")[2]]
    if options.grid:
        return [f"grid:{number}" for number in range(0, len(grid(folder / engine, engine)), options.every)]
    wanted = 30 if options.smoke else options.mutations
    share = SHARES.get(engine, 0.1) / sum(SHARES.get(each, 0.1) for each in engines)
    return [str(number) for number in range(options.first, options.first + round(wanted * share))]


def shared_memory() -> str | None:
    """Where files need no disk, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()

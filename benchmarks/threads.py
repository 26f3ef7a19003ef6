"""The time of a step by the number of threads and how they wait, on an idle and on a loaded machine.

    python benchmarks/threads.py HOME [--load 2] [--tokens 30]
    python benchmarks/threads.py --smoke            a few seconds, with the demo's model

HOME is a store. Each setting runs in a process of its own, because torch reads the variables when it is
loaded. One row is continued greedily, by the model alone and with the store. With --load, so many processes
keep a core busy beside it. For a limit of CPU time, run the program in a container or a control group.

JSON Lines go to stdout: milliseconds a token, of the clock and of the processor.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cells import TINY_LM, smoke_parts

SETTINGS: dict[str, dict[str, str]] = {
    "torch's own": {},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT=100000": {"GOMP_SPINCOUNT": "100000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
PROMPT = 20
"""Tokens of the beginning that is continued."""


def count_for_ever() -> None:
    """Keep a core busy."""
    while True:
        pass


def time_steps(home: str, tokens: int) -> dict[str, float]:
    """Return milliseconds a token, by the model alone and with the store; for this process's variables."""
    import torch

    import knnstore
    from knnstore.lm import KNNSettings

    lm = knnstore.load(home, device="cpu")
    text = "The proposal describes a change, and explains why it is better than what was there before. " * 2
    ids = torch.tensor([lm.reader.tokenize(text)[:PROMPT].tolist()])
    result: dict[str, float] = {"threads": torch.get_num_threads()}
    for count in (4, tokens):  # the first round loads what is loaded once
        for name, options in (("alone", {"knn": KNNSettings(k=1, lam=0.0)}), ("store", {})):
            wall, cpu = time.perf_counter(), time.process_time()
            lm.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                do_sample=False, pad_token_id=0, **options,
            )  # fmt: skip
            result[f"{name}, clock"] = round((time.perf_counter() - wall) / count * 1000, 1)
            result[f"{name}, processor"] = round((time.process_time() - cpu) / count * 1000, 1)
    lm.store.close()
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("home", nargs="?")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside it")
    parser.add_argument("--tokens", type=int, default=30)
    parser.add_argument("--once", action="store_true", help="only with the variables of this process")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(time_steps(options.home, options.tokens)))
        return
    if not options.smoke and options.home is None:
        parser.error("name a store, or --smoke")
    with tempfile.TemporaryDirectory() as scratch:
        settings = SETTINGS
        if options.smoke:
            import knnstore

            options.home, options.tokens = str(Path(scratch) / "home"), 4
            with knnstore.create(options.home, str(TINY_LM), device="cpu") as lm:
                lm.add(smoke_parts()["store"], domain="help")
            settings = {name: SETTINGS[name] for name in list(SETTINGS)[:2]}
        busy = [multiprocessing.Process(target=count_for_ever, daemon=True) for _ in range(options.load)]
        for process in busy:
            process.start()
        for name, variables in settings.items():
            environment = {key: value for key, value in os.environ.items() if key not in NAMES} | variables
            command = [sys.executable, __file__, options.home, "--once", "--tokens", str(options.tokens)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            print(json.dumps({"setting": name, "load": options.load, **json.loads(done.stdout)}), flush=True)
        for process in busy:
            process.terminate()


if __name__ == "__main__":
    main()

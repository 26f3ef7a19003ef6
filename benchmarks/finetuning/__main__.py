"""A store beside fine-tuning on the same text: perplexities, ratios with intervals, and all seconds.

    python benchmarks/finetuning DATA --model DIR --out DIR [--domain NAME ...] [--fractions 1 .5 .1]
    python benchmarks/finetuning DATA --model DIR --out OUT --seconds | --controls | --side store | tuned
    python benchmarks/finetuning --smoke       a minute, with the demo's model

DATA holds a folder for each domain with ``store.jsonl``, ``dev.jsonl`` and ``test.jsonl``, split by
document. Everything is chosen on dev (fine-tuning: AdamW, learning rate and epochs, with a schedule of its
own for each number of epochs; a store: by `calibrate`) and reported on test. The store has joined keys as
codes, n-grams of its text and one gate over all; each side stands with and without its document's cache,
weighed by a gate likewise. ``--seconds`` measures what a store (adding, counting, calibration)
and three epochs at a rate of 0.001 take, one after the other: let nothing run beside it. Each step is kept
in OUT, and a run that was stopped goes on after the last; models and stores go to ``--work``. The sides may
be made beside each other, by ``--side``, before the table. Markdown goes to stdout and OUT.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from controls import AGAIN, controls
from sides import Workshop
from steps import Step, step
from table import BASE, ON_TUNED, THRICE, TUNED, summary, table
from texts import Limits, leveled, read
from tuning import AT_LEAST, Tuning, lowest_of, thrice_of
from versions import source_hash

from knnstore.documents import TextDocument

TINY_LM = Path(__file__).parents[2] / "examples" / "tiny-lm"
Documents = dict[str, list[TextDocument]]


def say(message: str) -> None:
    """Tell what is going on, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def measure(name: str, parts: Documents, fraction: float, options: argparse.Namespace) -> str:
    """Return the table of a fraction of a domain."""
    place = Path(name) / f"{fraction:g}"
    inputs = "of-" + inputs_of(parts, options)
    results, work = options.out / place / inputs, options.work / place / inputs

    def made(of: str, make: Callable[[], Step]) -> Step:
        say(f"{place}: {of}")
        return step(results, of, make)

    model, train, device = options.model, parts["store"], options.device
    tuning = Tuning(model, train, parts["dev"], results, work / "tuned", device, say)
    shop = Workshop(**parts, folder=work, device=device, codes=options.codes, states=options.states)
    if options.seconds:
        if options.side != "tuned":
            timed = made("timed", lambda: shop.timed(model)).values
        if options.side != "store":
            thrice = tuning.run(1e-3, AT_LEAST)
        if options.side:
            return ""
        spent = {**timed["storing"], "calibrating": timed["calibrating"]}
        tokens = spent.pop("tokens")
        took, trained = sum(spent.values()), thrice["seconds"]
        listed = ", ".join(f"{of} {seconds:,.1f}" for of, seconds in spent.items())
        return (
            f"{name}, {device_name(device)}: {tokens:,} tokens, a store {took:,.1f} s ({listed}), "
            f"three epochs {trained:,.1f} s, ratio {took / trained:.2f}; dev {timed['dev']:.2f} and "
            f"{thrice['dev']:.2f}\n"
        )
    if options.controls:
        run = tuning.run(1e-3, AT_LEAST)
        steps = [
            made("unfitted", lambda: shop.unfitted(model, BASE, "")),
            made("unfitted-tuned", lambda: shop.unfitted(tuning.model(run), TUNED, ON_TUNED)),
            made(
                "controls", lambda: controls(model, **parts, rate=1e-3, device=device, epochs=options.overfit)
            ),
        ]
        found = {name: log_probs for one in steps for name, log_probs in one.log_probs.items()}
        assert np.allclose(found[BASE], found[AGAIN], atol=0.01), "in another order"
        return table(f"{name}, controls", found, [])
    steps = []
    if options.side != "tuned":
        store = made("store", lambda: shop.with_store(model, ""))
        classic = made("classic", lambda: shop.classic(model))
        steps += [classic, store, made("base", lambda: shop.alone(model, BASE))]
        if tokens := options.stored:
            steps.append(made(f"stored-{tokens}", lambda: shop.calibrated_on_itself(model, tokens)))
    if options.side != "store":
        runs = tuning.grid(options.rates, options.epochs)
        best, thrice = lowest_of(runs), thrice_of(runs)
        steps += [
            made("tuned-store", lambda: shop.with_store(tuning.model(best), ON_TUNED)),
            made("three", lambda: shop.alone(tuning.model(thrice), THRICE)),
            made("tuned", lambda: shop.alone(tuning.model(best), TUNED)),
        ]
    if options.side:
        return ""
    found = {name: log_probs for one in steps for name, log_probs in one.log_probs.items()}
    values = {
        "best": best, "thrice": thrice, "runs": len(runs),
        "tokens": store.values["tokens"], "saved": store.values["saved"], "device": device_name(device),
        "test_tokens": len(found[BASE]), "documents": len(np.unique(found["documents"])),
    }  # fmt: skip
    return table(f"{name}, {fraction:g} of the text", found, summary(values))


def inputs_of(parts: Documents, options: argparse.Namespace) -> str:
    """Return a name for all that results depend on: another version, text or option begins anew."""
    hashes = {split: [one.content_hash for one in documents] for split, documents in parts.items()}
    chosen = {name: getattr(options, name) for name in ("model", "rates", "epochs", "codes", "states")}
    said = {**hashes, **chosen, "device": device_name(options.device), "version": source_hash()}
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:12]


def device_name(device: str | None) -> str:
    """Describe the machine in words."""
    on_gpu = torch.cuda.is_available() and device != "cpu"
    return torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"


def part(documents: list[TextDocument], fraction: float) -> list[TextDocument]:
    """Return a fraction of the text, the same documents in every larger one."""
    smaller = round(1 / fraction)
    return [one for one, level in leveled(documents, (1, smaller)) if level == smaller]


def main() -> None:
    """Measure and print."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--model", default=str(TINY_LM))
    parser.add_argument("--out", type=Path, help="folder for what is found")
    parser.add_argument("--work", type=Path, help="folder for models and stores; default OUT/work")
    parser.add_argument("--domain", action="append", default=[], help="default all")
    parser.add_argument(
        "--fractions", type=float, nargs="+", default=[1, 0.5, 0.1], help="of the text stored"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3])
    parser.add_argument("--epochs", type=int, default=6, help="at most")
    parser.add_argument("--overfit", type=int, default=12, help="epochs of the overfitted model")
    parser.add_argument("--records", type=int, default=272_000, help="tokens of the store")
    parser.add_argument("--held-out", type=int, default=20_000, help="tokens of dev and of test")
    parser.add_argument("--codes", default="pq32", help="what keys are kept as")
    parser.add_argument("--states", type=int, default=3, help="of a key")
    parser.add_argument("--device", help="default is the GPU if there is one")
    parser.add_argument(
        "--stored", type=int, default=0, help="tokens of the store to calibrate on too, in steps of their own"
    )
    parser.add_argument("--controls", action="store_true", help="only what else might do what a store does")
    parser.add_argument(
        "--seconds",
        action="store_true",
        help="only those of three epochs and of a store, calibration included",
    )
    parser.add_argument("--side", choices=["store", "tuned"], help="only the steps of a side, and no table")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            smoke(Path(folder), options)
        return
    if not (options.data and options.out):
        parser.error("name the folder of the data and --out, or --smoke")
    options.work = options.work or options.out / "work"
    limits = Limits(store_tokens=options.records, held_out_tokens=options.held_out)
    texts = read(options.data, options.domain, options.model, limits)
    for fraction in options.fractions:
        for name, parts in texts.items():
            report(name, {**parts, "store": part(parts["store"], fraction)}, fraction, options)


def smoke(folder: Path, options: argparse.Namespace) -> None:
    """Topics of Python's help, cut short."""
    from pydoc_data.topics import topics

    torch.set_num_threads(1)  # with so little to do, waiting for another thread takes longer than the work
    long = [(name, " ".join(text.split())) for name, text in sorted(topics.items()) if len(text) > 900]
    store = [TextDocument(name, text[:900]) for name, text in long[24:]]
    held_out = [TextDocument(name, text[:300]) for name, text in long[:24]]
    options.out = options.work = folder
    options.overfit, options.stored = 1, 500
    options.rates, options.epochs, options.codes, options.states = [1e-3], 1, "pq8", 2
    report("help", {"store": store, "dev": held_out[:12], "test": held_out[12:]}, 1, options)


def report(name: str, parts: Documents, fraction: float, options: argparse.Namespace) -> None:
    """Measure, print and keep."""
    text = measure(name, parts, fraction, options)
    if options.side:
        return
    kind = "-seconds" if options.seconds else "-controls" if options.controls else ""
    (options.out / f"{name}-{fraction:g}{kind}.md").write_text(text, encoding="utf-8")
    print(text, flush=True)


if __name__ == "__main__":
    main()

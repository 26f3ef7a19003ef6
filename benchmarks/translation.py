"""A store of pairs beside fine-tuning on the same pairs, for a translation model and a client's text.

    python benchmarks/translation.py DATA --out OUT [--work DIR]
    python benchmarks/translation.py --smoke

DATA is a folder with ``base/train.jsonl`` and ``client/{store,dev,test}.jsonl``, rows of ``id``, ``source``
and ``text``; `parallel_text.py` makes one of installed packages. A small Marian model is trained on the base
pairs, or ``--model`` names one that is ready. Then the client's pairs are stored, and settings are calibrated
on dev; the model is also fine-tuned on the same pairs, with a learning rate that is chosen on dev; and both
are combined, in a store of the fine-tuned model. All four are judged on test, with and without the pairs
whose source is much like one that is stored; a further row is the text of the most similar stored source, as
a translation memory gives it. Each step is kept in OUT, and a run that was stopped goes on after the last
one. Models and stores go to ``--work``. Markdown goes to stdout.
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from marian import (
    Pair,
    make_batches,
    make_model,
    measure_perplexity,
    save_model,
    train,
    train_tokenizer,
)
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from steps import Step, step
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

import knnstore
from knnstore.lm import KNNLMForSeq2SeqLM, KNNSettings

ALONE = KNNSettings(lam=0.0)
SIDES = {"base": "base model", "tuned": "fine-tuned model"}
SIMILAR = 0.8
"""Two sources of which so large a share of all words is in both are near-duplicates."""
PARTS = 8
"""In so many parts a test is translated, by the model alone and with the store in turn."""


def say(message: str) -> None:
    """Print what is going on to standard error."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def read_pairs(path: Path, most: int | None = None) -> list[Pair]:
    """Return the first pairs of a file, all of them by default."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [{key: row[key] for key in ("id", "source", "text")} for row in rows[:most]]


@dataclasses.dataclass(frozen=True)
class Trial:
    """The pairs of a client, and how the sides are made and judged."""

    store: Sequence[Pair]
    dev: Sequence[Pair]
    test: Sequence[Pair]
    options: argparse.Namespace

    def train_base(self, folder: Path) -> Step:
        """Train the tokenizer and the base model on the base pairs, and save them to a folder."""
        options = self.options
        pairs = read_pairs(options.data / "base" / "train.jsonl")
        tokenizer = train_tokenizer(pairs, options.vocabulary)
        model = make_model(len(tokenizer), options.width, tuple(options.layers))
        batches = make_batches(tokenizer, pairs)
        seconds = train(model, batches, steps=options.steps, rate=options.rate, say=say)
        save_model(model, tokenizer, folder)
        values = {"pairs": len(pairs), "parameters": model.num_parameters(), "batches": len(batches)}
        return Step({**values, "seconds": seconds}, {})

    def tune(self, base: Path, rate: float, folder: Path) -> Step:
        """Fine-tune the base model on the stored pairs, save it to a folder, and score dev."""
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
        batches = make_batches(tokenizer, self.store)
        steps = self.options.passes * len(batches)
        seconds = train(model, batches, steps=steps, rate=rate, say=say)
        save_model(model, tokenizer, folder)
        dev = measure_perplexity(model, make_batches(tokenizer, self.dev))
        return Step({"rate": rate, "seconds": seconds, "dev": dev}, {})

    def make_store(self, model: Path, home: Path) -> Step:
        """Store the pairs for a model, and calibrate on dev."""
        shutil.rmtree(home, ignore_errors=True)
        lm = knnstore.create(home, str(model))
        with lm.store:
            begun = time.perf_counter()
            added = lm.add(self.store, domain="client")
            stored = time.perf_counter()
            found = lm.calibrate(self.dev, leave_out=True)  # as elsewhere, a few sentences are stored
            calibrated = time.perf_counter()
            values = {
                "pairs": added.added,
                "tokens": added.tokens,
                "storing": stored - begun,
                "calibrating": calibrated - stored,
                "settings": found.record.mixer if found.record else "the model alone",
                "dev": found.comparison.expected.ppl,
            }
        values["bytes"] = sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
        return Step(values, {})

    def judge(self, home: Path, similar: NDArray[np.bool_]) -> Step:
        """Score and translate test with the model of a store alone and with the store, in turn.

        Args:
            home: the store.
            similar: True for test pairs whose source is much like a stored one, shape (n,).
        """
        apart = [pair for pair, is_similar in zip(self.test, similar, strict=True) if not is_similar]
        texts: dict[str, list[str]] = {"alone": [], "store": []}
        seconds = dict.fromkeys(texts, 0.0)
        with knnstore.load(home) as lm:
            assert isinstance(lm, KNNLMForSeq2SeqLM)
            ppl = {}
            for name, pairs in (("all", self.test), ("apart", apart)):
                batches = make_batches(lm.tokenizer, pairs)  # `evaluate` refuses texts that are stored
                ppl[name] = {
                    kind: measure_perplexity(model, batches)
                    for kind, model in (("alone", lm.base), ("store", lm))
                }
            sources = [pair["source"] for pair in self.test]
            lm.translate(sources[:8], num_beams=self.options.beams)
            for part in np.array_split(np.arange(len(sources)), PARTS):
                for name, settings in (("alone", ALONE), ("store", None)):
                    begun = time.perf_counter()
                    found = lm.translate([sources[at] for at in part], settings, num_beams=self.options.beams)
                    seconds[name] += time.perf_counter() - begun
                    texts[name] += found
        return Step({"ppl": ppl, "seconds": seconds, "texts": texts}, {})


def find_similar(stored: Sequence[str], sources: Sequence[str]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Find the stored source that is most similar to each source, by the words that are in both.

    Args:
        stored: the sources that are searched.
        sources: the sources that are looked up.

    Returns:
        The index of the most similar stored source, int64, shape (n,); and the number of words in both
        divided by the number of words in either, 0 to 1, float64, shape (n,).
    """
    words = [set(source.lower().split()) for source in stored]
    sizes = np.array([len(of) for of in words])
    lists: dict[str, list[int]] = {}
    for at, of in enumerate(words):
        for word in of:
            lists.setdefault(word, []).append(at)
    postings = {word: np.array(found) for word, found in lists.items()}
    nearest, shares = np.zeros(len(sources), np.int64), np.zeros(len(sources))
    for at, source in enumerate(sources):
        known = set(source.lower().split())
        shared = np.zeros(len(stored), np.int64)
        for word in known & postings.keys():
            shared[postings[word]] += 1
        share = shared / (sizes + len(known) - shared)
        nearest[at] = share.argmax()
        shares[at] = share.max()
    return nearest, shares


def run(trial: Trial, model: Path | None, out: Path, work: Path) -> str:
    """Run all steps that were not run before, and return the report.

    Args:
        trial: the pairs and options.
        model: the base model's folder; None to train one.
        out: folder for results.
        work: folder for models and stores.
    """
    base = model or work / "base"

    def made(name: str, make: Callable[[], Step]) -> dict[str, Any]:
        say(name)
        return step(out, name, make).values

    def judged(side: str, folder: Path) -> dict[str, Any]:
        home = work / f"{side}.knn"
        values[f"{side} store"] = made(f"{side}-store", lambda: trial.make_store(folder, home))
        return made(f"{side}-judged", lambda: trial.judge(home, similar))

    def tuned(rate: float) -> tuple[Path, dict[str, Any]]:
        folder = work / f"tuned-{rate:g}"
        return folder, made(folder.name, lambda: trial.tune(base, rate, folder))

    # 1) Compare the client's test with what is stored.
    values: dict[str, Any] = {}
    sources = [pair["source"] for pair in trial.test]
    nearest, shares = find_similar([pair["source"] for pair in trial.store], sources)
    similar = shares >= SIMILAR
    known = {pair["source"] for pair in trial.store}
    values["exact"], values["similar"] = sum(source in known for source in sources), int(similar.sum())
    # 2) Train the base model, make a store for it, and judge both.
    if model is None:
        values["training"] = made("base", lambda: trial.train_base(base))
    results = {"base": judged("base", base)}
    # 3) Fine-tune with each learning rate, choose on dev, and do the same with the chosen model.
    runs = dict(map(tuned, trial.options.rates))
    values["tuning"] = list(runs.values())
    results["tuned"] = judged("tuned", min(runs, key=lambda folder: float(runs[folder]["dev"])))
    memory = [trial.store[at]["text"] for at in nearest]
    return report(trial, results, memory, similar, values)


def report(
    trial: Trial,
    results: dict[str, Any],
    memory: Sequence[str],
    similar: NDArray[np.bool_],
    values: dict[str, Any],
) -> str:
    """Return the tables in Markdown, and all other values as JSON.

    Args:
        trial: the pairs and options.
        results: values of `Trial.judge` of the base model and of the fine-tuned model.
        memory: text of the most similar stored source, for each test pair.
        similar: True for test pairs whose source is much like a stored one.
        values: what the steps took and chose.
    """
    references = [pair["text"] for pair in trial.test]
    selections = {"all": np.arange(len(references)), "apart": np.flatnonzero(~similar)}
    rows = [("text of the most similar stored source", list(memory), None, None)]
    for side, name in SIDES.items():
        found = results[side]
        for kind, added in (("alone", ""), ("store", " with a store")):
            speed = len(references) / found["seconds"][kind]
            ppl = {part: of[kind] for part, of in found["ppl"].items()}
            rows.append((name + added, found["texts"][kind], ppl, speed))
    bleu, chrf = BLEU(), CHRF()
    lines = [
        f"| side | all {len(references)} pairs: perplexity | BLEU | chrF "
        f"| {len(selections['apart'])} pairs apart: perplexity | BLEU | chrF | sentences/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, texts, ppl, speed in rows:
        cells = [name]
        for part, chosen in selections.items():
            given, expected = [texts[at] for at in chosen], [[references[at] for at in chosen]]
            cells += [
                f"{ppl[part]:.2f}" if ppl else "",
                f"{bleu.corpus_score(given, expected).score:.1f}",
                f"{chrf.corpus_score(given, expected).score:.1f}",
            ]
        lines.append("| " + " | ".join([*cells, f"{speed:.1f}" if speed else ""]) + " |")
    lines += ["", f"{bleu.get_signature()}, {chrf.get_signature()}", "", json.dumps(values, indent=1)]
    return "\n".join(lines)


def make_smoke_data(folder: Path) -> None:
    """Write pairs of random words, of which each has a translation, to a folder."""
    rng = np.random.default_rng(0)
    for name, count in (("base/train", 60), ("client/store", 40), ("client/dev", 200), ("client/test", 24)):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for at in range(count):
                words = rng.integers(40, size=rng.integers(3, 9)).tolist()
                source, text = (" ".join(f"{letter}{word}" for word in words) for letter in "st")
                file.write(json.dumps({"id": f"{name}{at}", "source": source, "text": text}) + "\n")


def main() -> None:
    """Measure and print."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, help="folder for results")
    parser.add_argument("--work", type=Path, help="folder for models and stores; default OUT/work")
    parser.add_argument("--model", type=Path, help="folder of a translation model; default is to train one")
    parser.add_argument("--vocabulary", type=int, default=8_000, help="of the trained model")
    parser.add_argument("--width", type=int, default=256, help="of the trained model")
    parser.add_argument("--layers", type=int, nargs=2, default=[3, 2], help="of encoder and decoder")
    parser.add_argument("--steps", type=int, default=3_600, help="of training, 2,048 tokens each")
    parser.add_argument("--rate", type=float, default=1.2e-3, help="learning rate of training")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3], help="of fine-tuning")
    parser.add_argument("--passes", type=int, default=3, help="of fine-tuning over the pairs")
    parser.add_argument("--pairs", type=int, default=20_000, help="stored, at most")
    parser.add_argument("--dev", type=int, default=2_500, help="pairs of dev, at most")
    parser.add_argument("--test", type=int, default=1_000, help="pairs of test, at most")
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true", help="a tiny model and random words")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            options.data, options.out, options.work = Path(folder, "data"), Path(folder), Path(folder)
            options.vocabulary, options.width, options.layers, options.steps = 160, 64, [1, 1], 30
            options.rates, options.passes, options.beams, options.threads = [1e-3], 1, 2, 1
            torch.set_num_threads(1)
            make_smoke_data(options.data)
            measure(options)
        return
    if not (options.data and options.out):
        parser.error("name the folder of the data and --out, or --smoke")
    options.work = options.work or options.out / "work"
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Read the pairs, run the trial and print the report; other pairs or options begin anew."""
    client = options.data / "client"
    limits = {"store": options.pairs, "dev": options.dev, "test": options.test}
    trial = Trial(
        *(read_pairs(client / f"{split}.jsonl", most) for split, most in limits.items()), options=options
    )
    chosen = {name: str(value) for name, value in vars(options).items() if name not in ("out", "work")}
    inputs = json.dumps([trial.store, trial.dev, trial.test, chosen])
    place = "of-" + hashlib.sha256(inputs.encode()).hexdigest()[:12]
    text = run(trial, options.model, options.out / place, options.work / place)
    (options.out / place / "report.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

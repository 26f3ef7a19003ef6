"""A store beside LoRA, fine-tuning and chunks in the prompt, on a model that people know; and its curves.

    python benchmarks/evidence DATA --model DIR --out DIR [--domain NAME ...] [--phase ngrams ...]
    python benchmarks/evidence DATA --model DIR --out DIR --table       tables again, without the model
    python benchmarks/evidence --smoke                                  a minute, with the demo's model

DATA holds a folder for each domain with ``store.jsonl``, ``dev.jsonl`` and ``test.jsonl``, split by
document. Everything is chosen and fitted on dev and judged on test. The sides are the model alone and with a
continuous cache; n-grams of parts of the store and of everything; keys of parts, with n-grams of the same
part and of everything; chunks of the stored text before the document, found with BM25 again every 200
tokens; models trained by LoRA, or with all weights, on the text that is stored as keys; n-grams together with
chunks, with trained models and with both; and n-grams that were calibrated on stored text. The measures are
perplexity and accuracy of the most probable token: of whole documents, from a document's 200th token on, and
of rare terms there (`selecting` says which). The phase ``lines`` completes lines of whole documents greedily
and measures how many are equal to the document's and how similar they are; it is meant for code. Intervals
are of 95 % over documents. Costs are bytes and seconds of the processor, so that other programs on the
machine change them little.

The phases are run in the order in which they are given, each for all domains. Each step's log-probabilities
are kept in OUT as .npz, and a run that was stopped goes on after the last step; the model's own passes are
kept window by window in ``--work``. Write down what you expect before a run: the program asks for
OUT/expected.md.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from selecting import Texts, find_rare_terms, read_texts
from sides import Plan, Sides
from table import make_report, make_summary, read_steps
from texts import domains_in, reader_of

from knnstore.documents import TextDocument, read_documents

TINY_LM = Path(__file__).parents[2] / "examples" / "tiny-lm"
PHASES: dict[str, Callable[[Sides], None]] = {
    "ngrams": Sides.measure_ngrams,
    "bm25": Sides.measure_chunks,
    "keys": Sides.measure_keys,
    "lora": Sides.measure_lora,
    "full": Sides.measure_full,
    "together": Sides.measure_together,
    "stored": Sides.measure_stored,
    "lines": Sides.measure_lines,
}


def say(message: str) -> None:
    """Tell what is going on, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def prepare(options: argparse.Namespace, plan: Plan, name: str, texts: Texts, terms: set[str]) -> Sides:
    """Return the sides of a domain; other texts, terms or options have other folders."""
    hashes = [[one.content_hash for one in part] for part in (texts.store, texts.dev, texts.test)]
    inputs = json.dumps([hashes, sorted(terms), plan.model])
    place = Path(name) / f"of-{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"
    folders = options.out / place, options.work / place
    return Sides(plan, texts, terms, *folders, lambda step: say(f"{name}: {step}"))


def measure(options: argparse.Namespace, plan: Plan, domains: dict[str, Sides]) -> None:
    """Run all phases, and write the tables after each."""
    for phase in options.phase:
        for name, sides in domains.items():
            PHASES[phase](sides)
            write_tables(options.out, [name])


def write_tables(out: Path, names: Sequence[str]) -> None:
    """Print the tables of domains and, for several domains, a summary; write all to OUT."""
    domains = {}
    for name in names:
        folder = max((out / name).glob("of-*"), key=lambda each: each.stat().st_mtime)
        domains[name] = read_steps(folder)
    texts = {name: make_report(name, found) for name, found in domains.items()}
    if len(domains) > 1:
        texts["summary"] = make_summary(domains)
    for name, text in texts.items():
        (out / f"{name}.md").write_text(text, encoding="utf-8")
        print(text, flush=True)


def run(options: argparse.Namespace) -> None:
    """Read the texts of all domains, and measure them."""
    reader = reader_of(options.model)
    names = domains_in(options.data)
    tokens = {"dev": options.dev, "test": options.test}
    plan = Plan(
        options.model, options.ngram_tokens, options.key_tokens, options.chunks, options.prompt_tokens,
        options.lora_rates, options.full_rates, options.epochs, options.chunk_dev, options.line_rounds,
        options.stored_tokens,
    )  # fmt: skip
    domains = {}
    for name in options.domain or names:
        texts = read_texts(
            options.data / name, reader, tokens, options.least, options.most, options.leave_out
        )
        others = read_documents([options.data / other / "store.jsonl" for other in names if other != name])
        domains[name] = prepare(options, plan, name, texts, find_rare_terms(texts.store, others))
    (options.out / "plan.json").write_text(json.dumps(asdict(plan), indent=1) + "\n", encoding="utf-8")
    measure(options, plan, domains)


def smoke(options: argparse.Namespace) -> None:
    """Measure topics of Python's help, cut short."""
    from pydoc_data.topics import topics

    torch.set_num_threads(1)  # with so little to do, waiting for another thread takes longer than the work
    long = [TextDocument(name, text) for name, text in sorted(topics.items()) if 900 < len(text) < 6000]
    held_out = [TextDocument(one.id, one.text[:900]) for one in long[:18]]
    texts = Texts(long[20:40], long[18], held_out[:9], held_out[9:], long[9:18])
    plan = Plan(str(TINY_LM), [2_000], [2_000], [32, 64], 64, [1e-3], [1e-3], 2, 2, 2, 20_000)
    measure(options, plan, {"help": prepare(options, plan, "help", texts, {"class", "object"})})


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
    parser.add_argument("--work", type=Path, help="folder for models, stores and passes; default OUT/work")
    parser.add_argument("--domain", action="append", default=[], help="default all")
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--table", action="store_true", help="only make the tables again")
    parser.add_argument("--dev", type=int, default=10_000, metavar="TOKENS")
    parser.add_argument("--test", type=int, default=15_000, metavar="TOKENS")
    parser.add_argument("--least", type=int, default=250, metavar="TOKENS", help="of a held-out document")
    parser.add_argument("--most", type=int, default=1_000, metavar="TOKENS", help="of a held-out document")
    parser.add_argument(
        "--leave-out", nargs="*", default=[], metavar="ID", help="held-out documents not used"
    )
    parser.add_argument("--ngram-tokens", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--key-tokens", type=int, nargs="+", default=[20_000, 80_000, 150_000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256], help="sizes, in tokens")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of all chunks in a prompt")
    parser.add_argument("--chunk-dev", type=int, default=5, help="documents of dev to choose the size on")
    parser.add_argument("--lora-rates", type=float, nargs="+", default=[5e-4, 2e-3])
    parser.add_argument("--full-rates", type=float, nargs="+", default=[5e-5, 2e-4])
    parser.add_argument("--epochs", type=int, default=1, help="of training; the best on dev counts")
    parser.add_argument("--line-rounds", type=int, default=7, help="lines of each document of test")
    parser.add_argument("--stored-tokens", type=int, default=64_000, help="of stored text to calibrate on")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            options.out = options.work = Path(folder)
            smoke(options)
        return
    if not (options.data and options.out):
        parser.error("name the folder of the data and --out, or --smoke")
    options.work = options.work or options.out / "work"
    if options.table:
        write_tables(options.out, options.domain or domains_in(options.data))
        return
    if not (options.out / "expected.md").is_file():
        parser.error(f"write down what you expect first, in {options.out / 'expected.md'}")
    run(options)


if __name__ == "__main__":
    main()

"""The sides of one domain. Each step makes some sides, judges them on test, and is kept."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from adapting import FULL, LORA, adapt
from chunks import ChunkIndex
from judging import judge
from next_lines import LineWriter, Place, draw_places, number_lines
from numpy.typing import NDArray
from passes import KeptPasses, PromptedPasses
from selecting import Texts, mark_terms, take_tokens
from steps import Step, step

import knnstore
from knnstore.documents import TextDocument
from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.lm.calibration import Calibration
from knnstore.lm.settings import derive_default
from knnstore.store import KNNStore

MODEL, CACHE, BM25 = "the model", "the model + cache", "BM25 in the prompt"
NGRAMS, KEYS, STORE, MIXED = "n-grams", "keys", "store", "keys + n-grams of everything"
LINES = "lines"
DEFAULT, CACHED = ", by default", " + cache"
ALL = "everything"
ALONE = KNNSettings(k=1, lam=0.0)
_DOMAIN = "d"
_BASE = "base"


@dataclass(frozen=True)
class Plan:
    """Sizes and settings of the comparison: the model, numbers of tokens, chunk sizes and learning rates."""

    model: str
    ngram_tokens: Sequence[int]
    """Numbers of tokens of the smaller stores of n-grams; the largest has everything."""
    key_tokens: Sequence[int]
    """Numbers of tokens of the stores of keys, ascending; adapted models see the text of the last one."""
    chunk_sizes: Sequence[int]
    """Sizes of chunks that are tried, in tokens."""
    prompt_tokens: int
    """Tokens of all chunks in a prompt."""
    lora_rates: Sequence[float]
    full_rates: Sequence[float]
    epochs: int
    """Epochs of training, of which the best on dev counts."""
    chunk_dev: int
    """Documents of dev on which the size of chunks is chosen."""
    line_rounds: int
    """Lines of each document of test that are completed."""
    stored_tokens: int
    """Tokens of stored text to calibrate on."""


class Sides:
    """The sides of one domain.

    Args:
        plan: what is measured.
        texts: the documents of the domain.
        terms: its rare terms.
        results: folder for the results of the steps.
        work: folder for stores, models and kept passes.
        say: function that is called with the name of each step that begins.
    """

    def __init__(
        self,
        plan: Plan,
        texts: Texts,
        terms: set[str],
        results: Path,
        work: Path,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._texts, self._terms = plan, texts, terms
        self._results, self._work, self._say = results, work, say

    def measure_ngrams(self) -> None:
        """Measure the model, the continuous cache, and n-grams of growing parts of the store."""
        self._step("model", self._judge_model)
        for tokens in (None, *self._plan.ngram_tokens):
            self._step(f"ngrams-{tokens or ALL}", lambda tokens=tokens: self._judge_ngrams(tokens))

    def measure_chunks(self) -> None:
        """Measure chunks of the stored text in the prompt, found with BM25, without and with n-grams."""
        self._step("bm25", self._judge_chunks)

    def measure_keys(self) -> None:
        """Measure keys of growing parts of the store, with n-grams of the same part and of everything."""
        for tokens in self._plan.key_tokens:
            self._step(f"keys-{tokens}", lambda tokens=tokens: self._judge_keys(tokens))

    def measure_lora(self) -> None:
        """Measure a model that was trained by LoRA, without and with n-grams of everything."""
        self._measure_adapted(LORA, self._plan.lora_rates)

    def measure_full(self) -> None:
        """Measure a model all of whose weights were trained, without and with n-grams of everything."""
        self._measure_adapted(FULL, self._plan.full_rates)

    def measure_together(self) -> None:
        """Measure a model that was trained by LoRA, with chunks in the prompt, without and with n-grams."""
        run = self._measure_adapted(LORA, self._plan.lora_rates)
        size = self._choose_size()
        self._step(f"{self._name(LORA)} + bm25", lambda: self._judge_together(run, size))

    def measure_stored(self) -> None:
        """Measure n-grams of everything that were calibrated on stored text, without and with dev."""
        for on, texts in (("stored text", []), ("dev and stored text", self._texts.dev)):
            self._step(f"ngrams-by-{on}", lambda on=on, texts=texts: self._judge_by_stored(on, texts))

    def measure_lines(self) -> None:
        """Measure greedy lines of whole documents, and number the lines of the documents that are judged."""
        self._step("line-numbers", self._number_lines)
        rounds = draw_places(self._texts.whole, self._base_reader, self._plan.line_rounds)
        for number, places in enumerate(rounds):
            self._step(f"lines-{number}", lambda places=places: self._complete_lines(places))

    def _judge_model(self) -> Step:
        """Judge the model alone; keep the target tokens, and check that test is not in the store."""
        lm = self._open_everything()
        places, judged = judge(lm, {MODEL: ALONE}, self._texts.test)
        tokens = lm.reader.tokenize_documents(self._texts.test)
        overlaps = lm.store.measure_overlaps(tokens, letters=lm.reader.letters)
        marked = mark_terms(self._texts.test, lm.reader, self._terms)
        pairs = zip(places.documents.tolist(), places.positions.tolist(), strict=True)
        rare = np.array([marked[document][position] for document, position in pairs])
        values = {
            "store_tokens": lm.store.info()["tokens"],
            "store_documents": len(self._texts.store),
            "test_documents": len(self._texts.test),
            "dev_documents": len(self._texts.dev),
            "dev_tokens": lm.reader.count_predicted(self._texts.dev),
            "shared_with_store": [round(float(overlap.share), 4) for overlap in overlaps],
            "rare_terms": len(self._terms),
            "test_seconds": lm.key_encoder.count_seconds(),
        }
        lm.store.close()
        return Step(values, {**judged, **places._asdict(), "rare": rare})

    def _judge_ngrams(self, tokens: int | None) -> Step:
        """Judge n-grams of a part of the store with so many tokens; None is everything."""
        if tokens is None:
            lm = self._open_everything()
            costs = self._time_everything()
        else:
            lm = self._create("ngrams", self._plan.model, _BASE, key=None)
            texts = take_tokens(self._texts.store, lm.reader, tokens)
            with processor_time() as adding:
                lm.add(texts, domain=_DOMAIN)
            _check_content(lm.store, texts)
            costs = {"adding": adding[0]}
        name = f"{NGRAMS} of {tokens or ALL}"
        default = derive_default(lm.store)
        found, seconds = self._calibrate(lm)
        sides = {name: best_without(found, "cache"), name + CACHED: chosen(found, lm)}
        if tokens is None:
            sides |= {name + DEFAULT: default, CACHE: cache_alone(found)}
        _, judged = judge(lm, sides, self._texts.test)
        check_perplexity(lm, sides[name + CACHED], judged[name + CACHED], self._texts.test)
        values = {**costs, **describe(lm, found, seconds, sides)}
        lm.store.close()
        return Step(values, judged)

    def _judge_chunks(self) -> Step:
        """Choose the size of chunks on dev, and judge the model with chunks, alone and with n-grams."""
        lm = self._open_everything()
        encoder, tried, costs = lm.key_encoder, {}, {}
        for size in self._plan.chunk_sizes:
            with processor_time() as indexing:
                index = self._index(lm, size)
            costs[size] = {"indexing": indexing[0], "bytes": index.bytes}
            lm.key_encoder = self._prompt(encoder, index, size, lm)
            _, judged = judge(lm, {MODEL: ALONE}, self._texts.dev[: self._plan.chunk_dev])
            tried[size] = float(judged[MODEL].mean())
            self._say(f"chunks of {size}: {np.exp(-tried[size]):.3f} on dev")
        size = max(tried, key=lambda each: tried[each])
        lm.key_encoder = self._prompt(encoder, self._index(lm, size), size, lm)
        found = self._judge_prompted(lm, BM25)
        values = {
            "size": size,
            "dev": {each: float(np.exp(-value)) for each, value in tried.items()},
            **costs[size],
        }
        return Step(values | found.values, found.log_probs)

    def _choose_size(self) -> int:
        """Return the size of chunks that is best on dev."""
        size: int = self._step("bm25", self._judge_chunks).values["size"]
        return size

    def _judge_together(self, run: Mapping[str, Any], size: int) -> Step:
        """Judge a trained model with chunks of this size in the prompt, alone and with n-grams."""
        lm = self._open_adapted(LORA, run)
        name = self._name(LORA)
        passes = f"{name}-{run['rate']:g}-bm25"
        lm.key_encoder = self._prompt(lm.key_encoder, self._index(lm, size), size, lm, passes)
        return self._judge_prompted(lm, f"{name} + {BM25}")

    def _judge_prompted(self, lm: KNNLMForCausalLM, name: str) -> Step:
        """Judge a model with chunks in the prompt, alone and with n-grams and the cache; close its store."""
        before = lm.key_encoder.count_seconds()
        _, judged = judge(lm, {name: ALONE}, self._texts.test)
        test_seconds = lm.key_encoder.count_seconds() - before
        found, seconds = self._calibrate(lm)
        sides = {f"{name} + {NGRAMS}{CACHED}": chosen(found, lm)}
        _, together = judge(lm, sides, self._texts.test)
        values = {"test_seconds": test_seconds, **describe(lm, found, seconds, sides, with_bytes=False)}
        lm.store.close()
        return Step(values, judged | together)

    def _judge_by_stored(self, on: str, texts: Sequence[TextDocument]) -> Step:
        """Judge n-grams of everything, calibrated on held-out and stored text."""
        lm = self._create(f"by-{on}", self._plan.model, _BASE, key=None, texts=self._texts.store)
        found, seconds = self._calibrate(lm, texts, stored_tokens=self._plan.stored_tokens)
        name = f"{NGRAMS} of {ALL}, by {on}"
        sides = {name: best_without(found, "cache"), name + CACHED: chosen(found, lm)}
        _, judged = judge(lm, sides, self._texts.test)
        lm.store.close()
        return Step(describe(lm, found, seconds, sides, with_bytes=False), judged)

    def _judge_keys(self, tokens: int) -> Step:
        """Judge a store with keys of so many tokens, with its own n-grams and with those of everything."""
        lm = self._create("keys", self._plan.model, _BASE)
        texts = take_tokens(self._texts.store, lm.reader, tokens)
        with processor_time() as adding:
            added = lm.add(texts, domain=_DOMAIN)
        _check_content(lm.store, texts)
        of = f" of {tokens}"
        default = derive_default(lm.store)
        found, seconds = self._calibrate(lm)
        own = {
            STORE + of + DEFAULT: default,
            KEYS + of: best_without(found, "cache", "ngrams"),
            STORE + of: best_without(found, "cache"),
            STORE + of + CACHED: chosen(found, lm),
        }
        _, judged = judge(lm, own, self._texts.test)
        check_perplexity(lm, own[STORE + of + CACHED], judged[STORE + of + CACHED], self._texts.test)
        values = {
            "adding": adding[0], "added": added.tokens, "tokens": lm.store.record_count(),
            **self._time_document(lm), **describe(lm, found, seconds, own),
        }  # fmt: skip
        # No store keeps n-grams of text without keys beside keys, so this one borrows the counts.
        everything = self._open_everything()
        counts = everything.store.ngrams()
        lm.store.ngrams = lambda *_, **__: counts
        found, seconds = self._calibrate(lm)
        both = {
            f"{MIXED}, {tokens} keys": best_without(found, "cache"),
            f"{MIXED}, {tokens} keys{CACHED}": chosen(found, lm),
        }
        _, together = judge(lm, both, self._texts.test)
        values["with everything"] = describe(lm, found, seconds, both)
        everything.store.close()
        lm.store.close()
        return Step(values, judged | together)

    def _number_lines(self) -> Step:
        """Return the line number of each token of test."""
        numbers = [number_lines(document, self._base_reader) for document in self._texts.test]
        return Step({}, {LINES: np.concatenate(numbers)})

    def _complete_lines(self, places: Sequence[Place]) -> Step:
        """Complete lines, and keep what each side wrote."""
        lines = [
            {
                "document": place.document,
                "rest": place.rest,
                "written": self._line_writer.write(place.before),
            }
            for place in places
        ]
        return Step({LINES: lines}, {})

    @cached_property
    def _line_writer(self) -> LineWriter:
        """Completes lines with the model, with n-grams of everything, with chunks, and with both.

        The settings are the best ones without the continuous cache, which does not count in generation.
        """
        size = self._choose_size()
        lm = self._open_everything()
        encoder, index = lm.key_encoder, self._index(lm, size)
        settings = []
        for each in (encoder, self._prompt(encoder, index, size, lm)):
            lm.key_encoder = each
            settings.append(best_without(self._calibrate(lm)[0], "cache"))
        lm.store.close()
        lm = knnstore.load(lm.store.home.path, device="cpu")  # a reader, which may stay open
        plain = {f"{NGRAMS} of {ALL}": settings[0], MODEL: ALONE}
        return LineWriter(lm, index, plain, {f"{BM25} + {NGRAMS}": settings[1], BM25: ALONE})

    def _measure_adapted(self, kind: str, rates: Sequence[float]) -> Mapping[str, Any]:
        """Train a model with each learning rate, and judge the one that is best on dev; return its values."""
        plan, dev = self._plan, self._texts.dev
        documents = take_tokens(self._texts.store, self._base_reader, plan.key_tokens[-1])
        runs = []
        for rate in rates:
            name = f"{self._name(kind)}-{rate:g}"
            train = lambda rate=rate, name=name: Step(  # noqa: E731
                adapt(kind, plan.model, documents, dev, rate, plan.epochs, self._work / name), {}
            )
            runs.append(self._step(name, train).values)
        best = min(runs, key=lambda run: run["dev"])
        return self._step(self._name(kind), lambda: self._judge_adapted(kind, best)).values

    def _name(self, kind: str) -> str:
        """Return the name of a trained model: its kind, and its epochs if there may be several."""
        return kind if self._plan.epochs == 1 else f"{kind}, up to {self._plan.epochs} epochs"

    def _open_adapted(self, kind: str, run: Mapping[str, Any]) -> KNNLMForCausalLM:
        """Return the store of the n-grams of everything for a trained model; it is made once."""
        name = f"{self._name(kind)}-{run['rate']:g}"
        model = str(self._work / name)
        return self._create(f"{name}-ngrams", model, name, key=None, texts=self._texts.store)

    def _judge_adapted(self, kind: str, run: Mapping[str, Any]) -> Step:
        """Judge a trained model, alone and with n-grams of everything and the cache."""
        lm, name = self._open_adapted(kind, run), self._name(kind)
        found, seconds = self._calibrate(lm)
        sides = {
            name: ALONE,
            name + CACHED: cache_alone(found),
            f"{name} + {NGRAMS}{CACHED}": chosen(found, lm),
        }
        _, judged = judge(lm, sides, self._texts.test)
        lm.store.close()
        return Step({**run, **describe(lm, found, seconds, sides, with_bytes=False)}, judged)

    def _open_everything(self) -> KNNLMForCausalLM:
        """Return the store of the n-grams of everything; it is made once."""
        return self._create("everything", self._plan.model, _BASE, key=None, texts=self._texts.store)

    def _time_everything(self) -> dict[str, float]:
        """Return processor seconds of a new store of the n-grams of everything, and of one document."""
        again = self._create("timed", self._plan.model, _BASE, key=None)
        again.store.ngrams()
        with processor_time() as adding:
            again.add(self._texts.store, domain=_DOMAIN)
        with processor_time() as counting:
            again.store.ngrams()
        costs = {"adding": adding[0], "counting": counting[0], **self._time_document(again)}
        again.store.close()
        shutil.rmtree(again.store.home.path)
        return costs

    def _time_document(self, lm: KNNLMForCausalLM) -> dict[str, float]:
        """Return the processor seconds of adding and of withdrawing one document, counts made again."""
        lm.store.ngrams()
        with processor_time() as adding:
            added = lm.add([self._texts.extra], domain=_DOMAIN)
            lm.store.ngrams()
        with processor_time() as withdrawing:
            lm.store.remove_document(self._texts.extra.id)
            lm.store.ngrams()
        return {"one_tokens": added.tokens, "add_one": adding[0], "withdraw_one": withdrawing[0]}

    def _create(
        self,
        name: str,
        model: str,
        passes: str,
        *,
        texts: Sequence[TextDocument] = (),
        key: str | None = "auto",
    ) -> KNNLMForCausalLM:
        """Open a store, or create it with some texts; its model keeps its passes.

        Args:
            name: name of the store.
            model: folder of the model.
            passes: name of the folder of the kept passes: one for each model.
            texts: documents of a new store.
            key: None for a store without keys.
        """
        home = self._work / "stores" / name
        if home.exists():
            lm = knnstore.load(home, "a", device="cpu")
        else:
            lm = knnstore.create(home, model, device="cpu", dtype="float32", key=key)
        if texts:
            lm.add(list(texts), domain=_DOMAIN)
        lm.key_encoder = KeptPasses(lm.key_encoder, self._work / "passes" / passes)
        return lm

    def _index(self, lm: KNNLMForCausalLM, size: int) -> ChunkIndex:
        """Return an index of chunks of the whole store."""
        return ChunkIndex(lm.reader, self._texts.store, size, self._plan.prompt_tokens)

    def _prompt(
        self, encoder: KeptPasses, index: ChunkIndex, size: int, lm: KNNLMForCausalLM, passes: str = "bm25"
    ) -> PromptedPasses:
        """Return the encoder that puts chunks of this size before the text."""
        folder = self._work / "passes" / f"{passes}-{size}"
        return PromptedPasses(encoder, folder, index, lm.reader.decode, lm.reader.prefix)

    def _calibrate(
        self,
        lm: KNNLMForCausalLM,
        texts: Sequence[TextDocument] | None = None,
        *,
        stored_tokens: int = 0,
    ) -> tuple[Calibration, float]:
        """Calibrate a store; return the result and processor seconds without the model's passes.

        Args:
            lm: the model with its store.
            texts: held-out text to calibrate on; None is dev.
            stored_tokens: number of tokens of stored text to calibrate on too.
        """
        before = lm.key_encoder.count_seconds()
        with processor_time() as calibrating:
            found = lm.calibrate(self._texts.dev if texts is None else texts, stored_tokens=stored_tokens)
        return found, calibrating[0] - (lm.key_encoder.count_seconds() - before)

    @cached_property
    def _base_reader(self) -> Any:
        lm = self._open_everything()
        lm.store.close()
        return lm.reader

    def _step(self, name: str, make: Callable[[], Step]) -> Step:
        """Run a step once, and keep its result."""
        self._say(name)
        return step(self._results, name, make)


def _check_content(store: KNNStore, texts: Sequence[TextDocument]) -> None:
    """Stop the program if a store has other documents than `texts`, e.g. those of a larger part.

    Stores grow from part to part, so a part whose results were deleted needs a new store.
    """
    if {document.id for document in store.documents()} != {text.id for text in texts}:
        raise SystemExit(
            f"{store.home.path} has documents of another part: delete this folder, and run again"
        )


def best_without(found: Calibration, *parts: str) -> KNNSettings:
    """Return the best settings that `calibrate` tried among the ones without these components."""
    tried = found.comparison.candidates
    allowed = [one for one in tried if all(getattr(one.by_half[0], part) is None for part in parts)]
    return min(allowed, key=lambda candidate: candidate.held_out.ppl).settings


def cache_alone(found: Calibration) -> KNNSettings:
    """Return the settings that `calibrate` tried with nothing but the continuous cache."""
    return next(one.settings for one in found.comparison.candidates if one.name == "cache")


def chosen(found: Calibration, lm: KNNLMForCausalLM) -> KNNSettings:
    """Return the settings that `calibrate` saved, or the default if it saved none."""
    return found.settings or derive_default(lm.store)


def check_perplexity(
    lm: KNNLMForCausalLM, settings: KNNSettings, log_probs: NDArray[Any], documents: Sequence[TextDocument]
) -> None:
    """Check that whole distributions give the target tokens what `evaluate` gives them.

    Raises:
        AssertionError: the perplexities differ by more than a thousandth.
    """
    ours, theirs = float(np.exp(-log_probs.mean())), lm.evaluate(documents, settings).knn_ppl
    assert abs(ours / theirs - 1) < 1e-3, f"perplexity {ours:.4f}, by evaluate {theirs:.4f}"


def describe(
    lm: KNNLMForCausalLM,
    found: Calibration,
    seconds: float,
    sides: Mapping[str, KNNSettings],
    *,
    with_bytes: bool = True,
) -> dict[str, Any]:
    """Return what is kept of a store and its calibration besides log-probabilities."""
    values: dict[str, Any] = {
        "calibrating": seconds,
        "saved": None if found.record is None else found.record.mixer,
        "tried": {one.name: round(one.held_out.ppl, 3) for one in found.comparison.candidates},
        "settings": {name: repr(settings)[:400] for name, settings in sides.items()},
    }
    if with_bytes:
        home = lm.store.home.path
        values["bytes"] = sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
    return values


@contextmanager
def processor_time() -> Iterator[list[float]]:
    """Measure processor seconds of this process, all its threads together; the list has them afterwards."""
    measured = [0.0]
    started = time.process_time()
    yield measured
    measured[0] = time.process_time() - started

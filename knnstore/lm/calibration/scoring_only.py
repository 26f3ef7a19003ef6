"""Finding the components that make generated text repeat itself, so that settings use them in scoring only.

Settings are fitted to text that people wrote. On generated text they may give too much weight to recent
tokens. The cache of recent text is always used in scoring only: with it, generated text repeated itself more
in every measurement (docs/benchmarks.md, "Repetition"). For the other components, this module continues
beginnings of held-out documents greedily. As long as the generated text repeats itself clearly more than text
of the model alone, one component more is left out of generation. If all components are left out, the model
generates alone.

A text repeats itself clearly more if its share of repeated bigrams, or of repeated 4-grams, is larger by more
than two standard errors. Generating takes longer than scoring and fitting together, so `calibrate` uses this
module only if it is asked to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from knnstore.documents import TextDocument
from knnstore.lm.reading import TextReader
from knnstore.lm.settings import GeneratingModel, KNNSettings, Repetition
from knnstore.progress import Progress

PROMPTS = 64
"""Largest number of beginnings; all are continued in one batch."""
LEAST_PROMPTS = 8
"""Least number of beginnings; with fewer, repetition is not measured."""
PROMPT_TOKENS, NEW_TOKENS = 32, 96
"""Number of tokens of a beginning, and of its continuation; both are smaller if the model's window is
short."""
_LONGEST_NGRAM = 4

_ALONE = KNNSettings(k=1, lam=0.0)


class Repeated(NamedTuple):
    """The shares of repeated n-grams in each of n texts, between 0 and 1, float64, shape (n,)."""

    bigrams: NDArray[np.float64]
    """Share of a text's bigrams that occur earlier in the text."""
    four_grams: NDArray[np.float64]
    """Share of a text's 4-grams that occur earlier in the text."""

    @classmethod
    def from_texts(cls, texts: Sequence[Sequence[int]]) -> Self:
        """Count the repeated bigrams and 4-grams of each text.

        Args:
            texts: token ids of each text, at least 4 tokens each.
        """
        lengths = 2, _LONGEST_NGRAM
        return cls(
            *(np.array([_compute_repeated_share(text, length) for text in texts]) for length in lengths)
        )

    def mean_shares(self, of: str) -> Repetition:
        """Return the mean shares of repeated n-grams over the texts, as a `Repetition` for reports.

        Args:
            of: name of the source of the texts, such as ``model`` or ``text``, for the result.
        """
        return Repetition(
            of, float(1 - self.bigrams.mean()), float(self.four_grams.mean()), len(self.four_grams)
        )

    def is_clearly_more_than(self, other: "Repeated") -> bool:
        """Check whether these texts repeat themselves clearly more than other texts.

        True if the mean share of repeated bigrams, or the mean share of repeated 4-grams, is larger by more
        than two standard errors of the difference.

        Args:
            other: the shares of the other texts, which continue the same beginnings in the same order.
        """
        differences = np.array([ours - theirs for ours, theirs in zip(self, other, strict=True)])
        errors = differences.std(1, ddof=1) / differences.shape[1] ** 0.5
        return bool((differences.mean(1) > 2 * errors).any())


def _compute_repeated_share(text: Sequence[int], length: int) -> float:
    """Return the share of a text's n-grams that occur earlier in the text, between 0 and 1.

    Args:
        text: tokens, at least `length`.
        length: number of tokens of an n-gram.
    """
    ngrams = list(zip(*(text[first:] for first in range(length)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams)


@dataclass(frozen=True)
class Beginnings:
    """The first tokens of documents, which a model continues to measure repetition."""

    prompts: NDArray[np.int64]
    """Tokens of the beginnings, int64, shape (n, t). The prefix token of documents, if there is one, is
    included."""
    ends: list[list[int]]
    """For each document that is long enough, the real `new` tokens after its beginning."""
    new: int
    """Number of tokens to generate for a continuation."""

    @classmethod
    def from_documents(cls, reader: TextReader, documents: Sequence[TextDocument]) -> Self:
        """Take up to `PROMPTS` prompts (short texts to continue) from documents.

        The beginning of each document comes first, then later parts of long documents. Documents that are
        shorter than a prompt are left out.

        Args:
            reader: the object that tokenizes the documents; the sizes of prompts and continuations depend on
                its window.
            documents: the documents.
        """
        length = min(PROMPT_TOKENS, reader.max_length // 4)
        new = min(NEW_TOKENS, reader.max_length - length - 1)
        parts = [
            (first, tokens[first : first + length + new].tolist())
            for tokens in reader.tokenize_documents(documents)
            for first in range(0, len(tokens) - length + 1, length + new)
        ]
        parts.sort(key=lambda part: part[0])
        chosen = [part for _, part in parts[:PROMPTS]]
        prompts = np.array([[*reader.prefix, *part[:length]] for part in chosen], np.int64)
        return cls(prompts, [part[length:] for part in chosen if len(part) == length + new], new)

    def generate_continuations(self, lm: GeneratingModel, settings: KNNSettings) -> list[list[int]]:
        """Continue each beginning greedily, and return the `new` generated tokens of each beginning.

        EOS tokens are not generated, so that all continuations have the same length.

        Args:
            lm: the model that generates.
            settings: settings of the store during generation.
        """
        prompts = torch.from_numpy(self.prompts).to(lm.reader.encoder.model.device)
        texts = lm.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            knn=settings,
            min_new_tokens=self.new,
            max_new_tokens=self.new,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            pad_token_id=0,
        )
        return list(texts[:, prompts.shape[1] :].tolist())


def find_scoring_only(
    lm: GeneratingModel,
    documents: Sequence[TextDocument],
    settings: KNNSettings,
    progress: Progress | None = None,
) -> tuple[tuple[str, ...], tuple[Repetition, ...]]:
    """Find the components of settings that make generated text repeat itself.

    The cache is always one of them. To find others, the model continues beginnings of documents greedily:
    once alone, and once with all components but the cache. If the second text repeats itself clearly more,
    further components are left out, one by one.

    Args:
        lm: the model that generates.
        documents: documents whose beginnings are continued; the selection of `settings` must exclude these
            documents. If they have fewer than `LEAST_PROMPTS` beginnings, nothing is measured.
        settings: the settings in force, with their selection.
        progress: progress display, which receives the start and the end of each generation; None for no
            display.

    Returns:
        Two values. First the names of the components to use in scoring only; all components if the model must
        generate alone. Then the measured repetition of each generation; empty if nothing was measured.
    """
    settings = replace(settings, scoring_only=())
    components, progress = settings.components, progress or Progress()
    out = tuple(name for name in components if name == "cache")
    begun = Beginnings.from_documents(lm.reader, documents)
    if out == components or len(begun.prompts) < LEAST_PROMPTS or begun.new < _LONGEST_NGRAM:
        return out, ()
    rows = [Repeated.from_texts(begun.ends).mean_shares("text")] if begun.ends else []

    def measure(name: str, settings: KNNSettings) -> Repeated:
        """Generate texts with these settings, and append the measured repetition to the table `rows`."""
        progress.start(f"generating: {name}", total=len(begun.prompts) * begun.new)
        repeated = Repeated.from_texts(begun.generate_continuations(lm, settings))
        progress.finish()
        rows.append(repeated.mean_shares(name))
        return repeated

    def measure_without(*left: str) -> Repeated:
        """Generate with all components but these, and measure how much the text repeats itself."""
        return measure(f"all but {', '.join(left)}" if left else "all", settings.without_components(*left))

    # 1) Generate with the model alone, and with all components but the cache.
    alone, current = measure("model", _ALONE), measure_without(*out)
    # 2) Leave out the component whose absence helps most, until the model alone repeats itself as much.
    while current.is_clearly_more_than(alone):
        remaining = [name for name in components if name not in out]
        if len(remaining) == 1:
            return components, tuple(rows)
        tried = {name: measure_without(*out, name) for name in remaining}
        best = min(remaining, key=lambda name: tried[name].four_grams.mean())
        out, current = (*out, best), tried[best]
    return out, tuple(rows)

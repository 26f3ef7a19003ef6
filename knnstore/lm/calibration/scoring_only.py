"""Find the components that make generated text repeat itself, so that they count in scoring only.

Settings are fitted to text that people wrote. On generated text they may give too much weight to recent
tokens. So this module continues beginnings of held-out documents greedily, and leaves out of generation

1. the cache, if generated text repeats itself more with the cache than without it, or more than text of the
   model alone (a small model repeats itself a lot, so the second comparison is not enough);
2. further components, one after another, while generated text repeats itself more than text of the model
   alone. If all components are left out, the model generates alone.

Texts repeat themselves more if the mean share of repeated bigrams, or of repeated 4-grams, is larger. Few
beginnings are continued where the difference is clear, because generating takes longer than all other steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from knnstore.documents import TextDocument
from knnstore.lm.reading import TextReader
from knnstore.lm.settings import KNNSettings, Repetition, WritingModel
from knnstore.progress import Progress

PROMPTS = 64
"""Largest number of beginnings."""
_FIRST_PROMPTS = 16
"""Number of beginnings that are continued first; more are continued only if a comparison is not clear."""
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

    def means(self, of: str) -> Repetition:
        """Return the mean shares of repeated n-grams over the texts, as a `Repetition` for reports.

        Args:
            of: name of the source of the texts, such as ``model`` or ``text``, for the result.
        """
        return Repetition(
            of, float(1 - self.bigrams.mean()), float(self.four_grams.mean()), len(self.four_grams)
        )

    def compare_to(self, other: "Repeated") -> tuple[bool, bool]:
        """Compare how much these texts and other texts repeat themselves.

        Args:
            other: the shares of the other texts, which continue the same beginnings in the same order; only
                texts whose beginning was continued on both sides are compared.

        Returns:
            True if the mean share of repeated bigrams, or the mean share of repeated 4-grams, is larger than
            the mean of the other texts. And True if more texts would hardly change this answer: one mean is
            larger, or both are smaller, by more than two standard errors.
        """
        count = min(len(self.bigrams), len(other.bigrams))
        differences = np.array([a[:count] - b[:count] for a, b in zip(self, other, strict=True)])
        means, errors = differences.mean(1), differences.std(1) / count**0.5
        is_clear = (means > 2 * errors).any() or (means < -2 * errors).all()
        return bool((means > 0).any()), bool(is_clear)


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
            for tokens in reader.tokenized(documents)
            for first in range(0, len(tokens) - length + 1, length + new)
        ]
        parts.sort(key=lambda part: part[0])
        chosen = [part for _, part in parts[:PROMPTS]]
        head = [] if reader.prefix is None else [reader.prefix]
        prompts = np.array([head + part[:length] for part in chosen], np.int64)
        return cls(prompts, [part[length:] for part in chosen if len(part) == length + new], new)

    def generate(
        self, lm: WritingModel, settings: KNNSettings, chosen: slice = slice(None)
    ) -> list[list[int]]:
        """Continue some beginnings greedily, and return the `new` generated tokens of each of them.

        EOS tokens are not generated, so that all continuations have the same length.

        Args:
            lm: the model that generates.
            settings: settings of the store during generation.
            chosen: the beginnings, by their index; they are continued in one batch. Default is all.
        """
        prompts = torch.from_numpy(self.prompts[chosen]).to(lm.reader.encoder.model.device)
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
    lm: WritingModel,
    documents: Sequence[TextDocument],
    settings: KNNSettings,
    progress: Progress | None = None,
) -> tuple[tuple[str, ...], tuple[Repetition, ...]]:
    """Find the components of settings that make generated text repeat itself.

    The model continues beginnings of documents greedily: with all components, with the model alone, and
    without single components. The cache must be left out of generation if text repeats itself more with it.
    Then other components must be left out, one after another, until the text repeats itself at most as much
    as text of the model alone.

    Args:
        lm: the model that generates.
        documents: documents whose beginnings are continued; the selection of `settings` must exclude these
            documents. If they have fewer than `LEAST_PROMPTS` beginnings, nothing is measured, and the cache
            is returned if the settings have one.
        settings: the settings in force, with their selection.
        progress: progress display, which receives the start and the end of each generation; None for no
            display.

    Returns:
        The names of the components that must count in scoring only; all components if the model must generate
        alone. And the measured repetition of each generation; empty if nothing was measured.
    """
    settings = replace(settings, scoring_only=())
    components = settings.components
    cache = tuple(name for name in components if name == "cache")
    begun = Beginnings.from_documents(lm.reader, documents)
    if not components or len(begun.prompts) < LEAST_PROMPTS or begun.new < _LONGEST_NGRAM:
        return cache, ()
    texts = _GeneratedTexts(lm, begun, settings, progress or Progress())
    texts.measure(None, _FIRST_PROMPTS)  # first in the report, because all others are compared with it
    # 1) Leave out the cache if text repeats itself more with it.
    out = tuple[str, ...]()
    if cache and (texts.repeat_more((), cache) or texts.repeat_more((), None)):
        out = cache
    # 2) Leave out the component whose absence helps most, until the model alone repeats itself as much.
    while texts.repeat_more(out, None):
        remaining = [name for name in components if name not in out]
        if len(remaining) == 1:
            return components, texts.report()
        tried = {name: texts.measure((*out, name), _FIRST_PROMPTS) for name in remaining}
        best = min(remaining, key=lambda name: tried[name].four_grams.mean())
        out = (*out, best)
    return out, texts.report()


class _GeneratedTexts:
    """Texts that are generated with different components, more of them where a comparison is not clear.

    In this class, components that are left out are a tuple of names; None stands for the model alone.

    Args:
        lm: the model that generates.
        begun: the beginnings to continue.
        settings: settings with all components.
        progress: progress display, which receives the start and the end of each generation.
    """

    def __init__(
        self, lm: WritingModel, begun: Beginnings, settings: KNNSettings, progress: Progress
    ) -> None:
        self._lm, self._begun, self._settings, self._progress = lm, begun, settings, progress
        self._measured: dict[tuple[str, ...] | None, Repeated] = {}

    def repeat_more(self, left_out: tuple[str, ...], other: tuple[str, ...] | None) -> bool:
        """Check whether texts without some components repeat themselves more than texts without others.

        The first `_FIRST_PROMPTS` beginnings are continued, then twice as many, and so on, until the
        difference of the means is above two standard errors, or all beginnings are continued.

        Args:
            left_out: the components that are left out of the texts.
            other: the components that are left out of the texts to compare with.
        """
        count = min(_FIRST_PROMPTS, len(self._begun.prompts))
        while True:
            is_more, is_clear = self.measure(left_out, count).compare_to(self.measure(other, count))
            if is_clear or count == len(self._begun.prompts):
                return is_more
            count = min(2 * count, len(self._begun.prompts))

    def measure(self, left_out: tuple[str, ...] | None, count: int) -> Repeated:
        """Return the repetition of at least `count` texts; texts that are missing are generated."""
        count = min(count, len(self._begun.prompts))
        known = self._measured.get(left_out, Repeated(np.empty(0), np.empty(0)))
        if len(known.bigrams) < count:
            missing = slice(len(known.bigrams), count)
            settings = _ALONE if left_out is None else self._settings.without(*left_out)
            tokens = (count - len(known.bigrams)) * self._begun.new
            self._progress.start(f"generating: {_name_texts(left_out)}", total=tokens)
            new = Repeated.from_texts(self._begun.generate(self._lm, settings, missing))
            self._progress.finish()
            known = Repeated(*(np.concatenate(pair) for pair in zip(known, new, strict=True)))
            self._measured[left_out] = known
        return known

    def report(self) -> tuple[Repetition, ...]:
        """Return the mean repetition of the documents, if they are long enough, and of generated texts."""
        ends = self._begun.ends
        rows = [Repeated.from_texts(ends).means("text")] if ends else []
        return (*rows, *(shares.means(_name_texts(left_out)) for left_out, shares in self._measured.items()))


def _name_texts(left_out: tuple[str, ...] | None) -> str:
    """Return the name of generated texts for reports, e.g. ``all but cache``, ``all`` or ``model``."""
    if left_out is None:
        return "model"
    return f"all but {', '.join(left_out)}" if left_out else "all"

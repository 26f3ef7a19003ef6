"""What is left out of settings where text is written, so that it does not repeat itself.

Settings are fitted to text that others wrote. With text of their own before them they may be too sure of what
was said a moment ago. So beginnings of held-out documents are continued greedily, and a component is left out

- if it is a cache, and text repeats itself more with it than without: a small model repeats itself anyway,
  and is no measure of what a cache does;
- as long as text repeats itself more than what the model alone writes, the cache before all others; in the
  end the model writes alone.

"More" is by the means, of bigrams or of 4-grams: retrieval has to show that it does no harm.
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
"""At most so many are continued, all together."""
LEAST_PROMPTS = 8
PROMPT_TOKENS, NEW_TOKENS = 32, 96
"""Fewer with a model whose window is shorter."""
_LONGEST_NGRAM = 4

_ALONE = KNNSettings(k=1, lam=0.0)


class Repeated(NamedTuple):
    """How much each of n texts repeats itself: shares between 0 and 1, float64, shape (n,)."""

    bigrams: NDArray[np.float64]
    """Of its bigrams, those that stood earlier in it."""
    four_grams: NDArray[np.float64]

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> Self:
        """Count in texts of at least 4 tokens each, given by these."""
        return cls(*(np.array([_repeated(text, length) for text in texts]) for length in (2, _LONGEST_NGRAM)))

    def means(self, of: str) -> Repetition:
        """As it is kept."""
        return Repetition(
            of, float(1 - self.bigrams.mean()), float(self.four_grams.mean()), len(self.four_grams)
        )

    def is_more_than(self, other: "Repeated") -> bool:
        """Whether these texts repeat themselves more than n others with the same beginnings, on average."""
        return any(ours.mean() > theirs.mean() for ours, theirs in zip(self, other, strict=True))


def _repeated(text: Sequence[int], length: int) -> float:
    found = list(zip(*(text[first:] for first in range(length)), strict=False))
    return 1 - len(set(found)) / len(found)


@dataclass(frozen=True)
class Beginnings:
    """Beginnings of documents, to be continued."""

    prompts: NDArray[np.int64]
    """With the token that begins a document, shape (n, t)."""
    ends: list[list[int]]
    """What follows in the documents, where it is as long as a continuation."""
    new: int
    """Tokens of a continuation."""

    @classmethod
    def of(cls, reader: TextReader, documents: Sequence[TextDocument]) -> Self:
        """Take up to `PROMPTS` from documents: the beginning of each, then later parts of the long ones."""
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

    def continued(self, lm: WritingModel, settings: KNNSettings) -> list[list[int]]:
        """Continue each greedily; what ends a text does not end it here."""
        prompts = torch.from_numpy(self.prompts).to(lm.reader.encoder.model.device)
        texts = lm.generate(
            prompts, attention_mask=torch.ones_like(prompts), knn=settings,
            min_new_tokens=self.new, max_new_tokens=self.new, do_sample=False, num_beams=1, use_cache=True,
            pad_token_id=0,
        )  # fmt: skip
        return list(texts[:, prompts.shape[1] :].tolist())


def find_scoring_only(
    lm: WritingModel,
    documents: Sequence[TextDocument],
    settings: KNNSettings,
    progress: Progress | None = None,
) -> tuple[tuple[str, ...], tuple[Repetition, ...]]:
    """Find which components of settings are to count in scoring only.

    Args:
        lm: writes.
        documents: which it does not retrieve from. Where they have fewer than `LEAST_PROMPTS` beginnings,
            nothing is measured, and a cache is left out.
        settings: in use for their selection.
        progress: is told of each way to write.

    Returns:
        Names of components, all of them where the model is to write alone, and what was measured.
    """
    settings = replace(settings, scoring_only=())
    components = settings.components
    cache = tuple(name for name in components if name == "cache")
    begun = Beginnings.of(lm.reader, documents)
    if not components or len(begun.prompts) < LEAST_PROMPTS or begun.new < _LONGEST_NGRAM:
        return cache, ()
    progress = progress or Progress()
    rows = [Repeated.of(begun.ends).means("text")] if begun.ends else []

    def written(of: str, settings: KNNSettings) -> Repeated:
        progress.start(f"writing: {of}", total=len(begun.prompts) * begun.new)
        found = Repeated.of(begun.continued(lm, settings))
        progress.finish()
        rows.append(found.means(of))
        return found

    def written_without(*left: str) -> Repeated:
        return written(f"all but {', '.join(left)}" if left else "all", settings.without(*left))

    alone = written("model", _ALONE)
    out, found = tuple[str, ...](), written_without()
    if cache:
        without = written_without(*cache)
        if found.is_more_than(without) or found.is_more_than(alone):
            out, found = cache, without
    while found.is_more_than(alone):
        left = [name for name in components if name not in out]
        if len(left) == 1:
            return components, tuple(rows)
        tried = {name: written_without(*out, name) for name in left}
        best = min(left, key=lambda name: tried[name].four_grams.mean())
        out, found = (*out, best), tried[best]
    return out, tuple(rows)

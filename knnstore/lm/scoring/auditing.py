"""Checking, on a sample, that a perplexity is what it claims to be.

Nothing here trusts the code that scores. The mixture is computed over the whole vocabulary by `forward`, as
generation has it; what a token must not know is replaced by something else; stored text is looked for word
by word.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.documents import documents_of
from knnstore.errors import InputError
from knnstore.lm.mixture import mixture_of
from knnstore.lm.scoring.held_out import score_texts
from knnstore.lm.settings import KNNSettings, ReadingModel, resolve
from knnstore.store import KNOWN

_DOCUMENTS = 8
_TOKENS = 256
"""Of a document at most: its beginning, within one window."""
_SUM = 1e-3
_NATS = 0.02
"""By which log p, or p, may differ between two passes, of which each rounds in its own order."""
_ON_AVERAGE = 0.005
"""By which log p may: a few tokens that are told what comes would flatter by more."""


Texts = Sequence[NDArray[np.uint32]]


class Predicts(ReadingModel, Protocol):
    """`KNNLMForCausalLM`: also the mixture over the whole vocabulary."""

    def __call__(self, input_ids: Tensor, *, knn: KNNSettings) -> Any:
        """Return an output whose ``logits`` are log-probabilities."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    found: str
    """What was seen, in a few words."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found; it stands for the settings and the documents that it was made with."""

    documents: int
    tokens: int
    """Of the sample."""
    checks: tuple[Check, ...]
    stored_share: float
    """Of all tokens given, those in runs of 32 that the selected documents have too."""

    @property
    def passed(self) -> bool:
        """Whether every check has passed."""
        return all(check.passed for check in self.checks)


class _Scored(NamedTuple):
    """The tokens of one text, by position."""

    positions: list[int]
    base: Tensor
    mixed: Tensor
    """log p of the tokens, float32, shape (n,)."""


def audit(
    lm: Predicts, documents: Iterable[object], knn: KNNSettings | None = None, *, seed: int = 0
) -> Audit:
    """Check how documents are scored: normalization, what a token is told, what is stored, what is compared.

    The mixture is checked on the beginnings of some documents, what is stored on all of them.

    Args:
        lm: the model.
        documents: as in `evaluate`.
        knn: settings of this call; default ``lm.knn``.
        seed: chooses documents and positions.

    Raises:
        InputError: no document has two tokens to predict.
    """
    settings, reader = resolve(lm.store, knn or lm.knn), lm.reader
    listed, rng = list(documents_of(documents)), np.random.default_rng(seed)
    texts = reader.tokenized(listed)
    long_enough = [number for number, tokens in enumerate(texts) if len(tokens) > 2]
    if not long_enough:
        raise InputError("nothing to audit: no document holds two tokens to predict")
    chosen = rng.permutation(long_enough)[:_DOCUMENTS]
    sample = [texts[number][: min(_TOKENS, reader.max_length - 1)] for number in chosen]
    scored = _score(lm, sample, settings)
    overlaps = lm.store.overlaps(texts, settings.selection, reader.letters)
    shared = sum(one.share * len(tokens) for one, tokens in zip(overlaps, texts, strict=True))
    share = shared / sum(map(len, texts))
    exact = lm.store.stored_content((one.content_hash for one in listed), settings.selection)
    inside = [
        f"{document.id} ({overlap.share:.0%})"
        for document, overlap in zip(listed, overlaps, strict=True)
        if overlap.share >= KNOWN or document.content_hash in exact
    ]
    of_store = f"{len(inside):,} of {len(listed):,} documents; {share:.1%} of all tokens in stored runs"
    checks = (
        *_check_told(lm, sample, scored, settings, rng),
        _check_base(lm, sample, scored, settings),
        Check("no evaluated text in the store", not inside, ": ".join([of_store, *inside[:1]])),
    )
    return Audit(len(sample), sum(len(one.positions) for one in scored), checks, share)


def _check_told(
    lm: Predicts, sample: Texts, scored: Sequence[_Scored], settings: KNNSettings, rng: np.random.Generator
) -> list[Check]:
    """Whether what was scored is of a distribution over the vocabulary that knows only what came before."""
    cuts = [int(rng.integers(1, len(tokens))) for tokens in sample]
    vocabulary = lm.store.identity.vocab_size
    others = [
        np.concatenate([tokens[:cut], _others(tokens[cut:], vocabulary, rng)])
        for tokens, cut in zip(sample, cuts, strict=True)
    ]
    sums, gaps, told, excess = [0.0], [0.0], [0.0], [torch.zeros(1)]
    changed = _score(lm, others, settings)
    for text, other, cut, one, two in zip(sample, others, cuts, scored, changed, strict=True):
        whole, whole_changed = (_distributions(lm, tokens, settings) for tokens in (text, other))
        at = torch.tensor(one.positions)
        gold = whole[at, torch.from_numpy(text.astype(np.int64))[at]]
        sums.append(float((whole.exp().sum(1) - 1).abs().max()))
        gaps.append(float((gold - one.mixed).abs().quantile(0.99)))
        excess.append(one.mixed - gold)
        again = dict(zip(two.positions, two.mixed.tolist(), strict=True))
        pairs = zip(one.positions, one.mixed.tolist(), strict=True)
        told += [abs(log_p - again[at]) for at, log_p in pairs if at < cut and at in again]
        told.append(float((whole[: cut + 1].exp() - whole_changed[: cut + 1].exp()).abs().max()))
        if cut in again:  # what the other token was given, where nobody could know of it
            told.append(abs(math.exp(again[cut]) - float(whole[cut, int(other[cut])].exp())))
    average = float(torch.cat(excess).mean())
    return [
        Check("the vocabulary's probabilities sum to 1", max(sums) < _SUM, f"off by {max(sums):.1e} at most"),
        Check(
            "scored as among all tokens",
            max(gaps) < _NATS and abs(average) < _ON_AVERAGE,
            f"log p differs by {max(gaps):.1e}, on average by {average:.1e}",
        ),
        Check("no token saw itself or a later one", max(told) < _NATS, f"p differs by {max(told):.1e}"),
    ]


def _check_base(lm: ReadingModel, sample: Texts, scored: Sequence[_Scored], settings: KNNSettings) -> Check:
    """Whether model and mixture are judged by the same tokens, each once."""
    nothing = KNNSettings(lam=0, selection=settings.selection)
    first = 0 if lm.reader.prefix is not None else 1
    same = all(
        one.positions == alone.positions == list(range(first, len(text)))
        and bool(((one.base - alone.mixed).abs() < _NATS).all())
        for text, one, alone in zip(sample, scored, _score(lm, sample, nothing), strict=True)
    )
    tokens = sum(len(one.positions) for one in scored)
    return Check("model and mixture on the same tokens", same, f"{tokens:,} tokens")


def _others(tokens: NDArray[np.uint32], vocabulary: int, rng: np.random.Generator) -> NDArray[np.uint32]:
    """Other tokens in place of some."""
    further = rng.integers(1, vocabulary, len(tokens))
    return ((tokens.astype(np.int64) + further) % vocabulary).astype(np.uint32)


def _score(lm: ReadingModel, texts: Texts, settings: KNNSettings) -> list[_Scored]:
    """Score texts as `evaluate` does."""
    found = [dict[int, tuple[float, float]]() for _ in texts]
    for scores in score_texts(lm.store, lm.reader, texts, settings):
        mixed = mixture_of(settings, scores.evidence).gold(scores.lm_log_probs, scores.targets)
        columns = scores.documents, scores.positions, scores.lm_log_probs, mixed
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for document, position, base, log_prob in rows:
            found[document][position] = base, log_prob
    scored = []
    for of in found:
        positions = sorted(of)
        both = torch.tensor([of[position] for position in positions]).reshape(-1, 2)
        scored.append(_Scored(positions, both[:, 0], both[:, 1]))
    return scored


def _distributions(lm: Predicts, tokens: NDArray[np.uint32], settings: KNNSettings) -> Tensor:
    """Log-probabilities of every token at each position of a text, float32, shape (n, v).

    Without a prefix nothing predicts the first: its row stands for none, and is uniform.
    """
    reader = lm.reader
    prefix = [] if reader.prefix is None else [reader.prefix]
    ids = torch.tensor([[*prefix, *tokens.tolist()]], device=reader.encoder.model.device)
    with torch.inference_mode():
        rows: Tensor = lm(ids, knn=settings).logits[0, :-1].float().cpu()
    if settings.is_model_alone:  # whose logits are left as they are
        rows = rows.log_softmax(-1)
    if prefix:
        return rows
    return torch.cat([torch.full_like(rows[:1], 1 / rows.shape[1]).log(), rows])

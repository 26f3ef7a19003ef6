"""Auditing: checks, on a sample of the documents, that a perplexity is measured correctly.

The checks do not rely on the scoring code. They compute the mixture over the whole vocabulary with `forward`,
as in generation. They replace later tokens by other tokens, to find out whether a score depends on them. They
search the stored text for passages of the documents.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.documents import convert_rows_to_documents
from knnstore.errors import ConfigError, InputError
from knnstore.lm.mixture import build_mixture
from knnstore.lm.scoring.token_scores import score_texts
from knnstore.lm.settings import KNNSettings, ReadingModel, resolve
from knnstore.store import KNOWN

_SAMPLE_DOCUMENTS = 8
_SAMPLE_TOKENS = 256
"""Largest number of tokens of a sampled document, from its beginning and within one window."""
_SUM_TOLERANCE = 1e-3
_TOLERANCE = 0.02
"""Largest accepted difference of log p, or of p, between two passes, which differ by rounding."""
_MEAN_TOLERANCE = 0.005
"""Largest accepted mean difference of log p. If a few tokens knew the next token, the mean would differ by
more."""


Texts = Sequence[NDArray[np.uint32]]


class Predicts(ReadingModel, Protocol):
    """A model that also computes the mixture over the whole vocabulary, such as `KNNLMForCausalLM`."""

    def __call__(self, input_ids: Tensor, *, knn: KNNSettings) -> Any:
        """Run the model on token ids with these settings; the output's ``logits`` are log-probabilities."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    """Description of the check, in a few words."""
    passed: bool
    """True if the check found no error."""
    found: str
    """The measured value, in a few words."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The results of all checks, valid for the settings and the documents of the audit."""

    documents: int
    """Number of sampled documents."""
    tokens: int
    """Number of tokens of the sample."""
    checks: tuple[Check, ...]
    stored_share: float
    """Fraction of the tokens of all documents that belong to passages of at least 32 tokens which are also in
    the selected stored text."""

    @property
    def passed(self) -> bool:
        """True if every check passed, False if a check found an error."""
        return all(check.passed for check in self.checks)


class _Scored(NamedTuple):
    """The scored tokens of one text, by position."""

    positions: list[int]
    """Index of each scored token in the text, ascending."""
    base: Tensor
    """log p_LM of each gold token, float32, shape (n,)."""
    mixed: Tensor
    """log p of the mixture of each gold token, float32, shape (n,)."""


def audit(
    lm: Predicts, documents: Iterable[object], knn: KNNSettings | None = None, *, seed: int = 0
) -> Audit:
    """Check that documents are scored correctly, and return the results of all checks.

    There are five checks:

    1. The probabilities of the vocabulary sum to 1.
    2. Each score equals the token's value in the distribution over the whole vocabulary.
    3. No score depends on the scored token itself or on later tokens.
    4. Model and mixture are compared on the same tokens.
    5. No document is in the store.

    The last check uses all documents, the other checks use the beginnings of a few documents.

    Args:
        lm: the model.
        documents: the documents, in any form that `evaluate` takes.
        knn: settings of this call; default ``lm.knn``.
        seed: seed of the choice of documents and positions.

    Raises:
        InputError: no document has two tokens to predict.
        ConfigError: the model is an encoder-decoder model.
    """
    settings, reader = resolve(lm.store, knn or lm.knn), lm.reader
    if reader.reads_pairs:
        raise ConfigError("an audit needs a causal model, but this is an encoder-decoder model")
    listed, rng = list(convert_rows_to_documents(documents)), np.random.default_rng(seed)
    texts = reader.tokenize_documents(listed)
    long_enough = [number for number, tokens in enumerate(texts) if len(tokens) > 2]
    if not long_enough:
        raise InputError("nothing to audit: no document has two tokens to predict")
    chosen = rng.permutation(long_enough)[:_SAMPLE_DOCUMENTS]
    sample = [texts[number][: min(_SAMPLE_TOKENS, reader.max_length - 1)] for number in chosen]
    scored = _score_texts(lm, sample, settings)
    overlaps = lm.store.measure_overlaps(texts, settings.selection, reader.letters)
    shared = sum(overlap.share * len(tokens) for overlap, tokens in zip(overlaps, texts, strict=True))
    share = shared / sum(map(len, texts))
    exact = lm.store.find_stored_hashes((document.content_hash for document in listed), settings.selection)
    stored = [
        f"{document.id} ({overlap.share:.0%})"
        for document, overlap in zip(listed, overlaps, strict=True)
        if overlap.share >= KNOWN or document.content_hash in exact
    ]
    summary = f"{len(stored):,} of {len(listed):,} documents; {share:.1%} of all tokens in stored runs"
    checks = (
        *_check_distributions(lm, sample, scored, settings, rng),
        _check_base(lm, sample, scored, settings),
        Check("no evaluated text in the store", not stored, ": ".join([summary, *stored[:1]])),
    )
    return Audit(len(sample), sum(len(text.positions) for text in scored), checks, share)


def _check_distributions(
    lm: Predicts, sample: Texts, scored: Sequence[_Scored], settings: KNNSettings, rng: np.random.Generator
) -> list[Check]:
    """Check that scores come from a distribution over the vocabulary that depends on earlier tokens only.

    Each text is scored again after all tokens from a random position on were replaced by other tokens.

    Args:
        lm: the model.
        sample: the tokens of each sampled text.
        scored: the scores of each sampled text.
        settings: the settings in force.
        rng: random generator that chooses the positions and the other tokens.

    Returns:
        The results of three checks: the probabilities sum to 1; each score equals the token's value in the
        whole distribution; and no score depends on the scored token itself or on later tokens.
    """
    # 1) Score copies of the texts whose last tokens are replaced.
    cuts = [int(rng.integers(1, len(tokens))) for tokens in sample]
    vocabulary = lm.store.identity.vocab_size
    replaced = [
        np.concatenate([tokens[:cut], _replace_tokens(tokens[cut:], vocabulary, rng)])
        for tokens, cut in zip(sample, cuts, strict=True)
    ]
    sums, gaps, leaks, excess = [0.0], [0.0], [0.0], [torch.zeros(1)]
    rescored = _score_texts(lm, replaced, settings)
    # 2) Compare the scores with the whole distribution, and with the scores of the copies.
    for text, other, cut, first, second in zip(sample, replaced, cuts, scored, rescored, strict=True):
        whole, whole_changed = (_compute_distributions(lm, tokens, settings) for tokens in (text, other))
        at = torch.tensor(first.positions)
        gold = whole[at, torch.from_numpy(text.astype(np.int64))[at]]
        sums.append(float((whole.exp().sum(1) - 1).abs().max()))
        gaps.append(float((gold - first.mixed).abs().quantile(0.99)))
        excess.append(first.mixed - gold)
        again = dict(zip(second.positions, second.mixed.tolist(), strict=True))
        pairs = zip(first.positions, first.mixed.tolist(), strict=True)
        leaks += [abs(log_p - again[at]) for at, log_p in pairs if at < cut and at in again]
        leaks.append(float((whole[: cut + 1].exp() - whole_changed[: cut + 1].exp()).abs().max()))
        if cut in again:  # the replaced token, which the distribution at `cut` cannot know
            leaks.append(abs(math.exp(again[cut]) - float(whole[cut, int(other[cut])].exp())))
    average = float(torch.cat(excess).mean())
    return [
        Check(
            "the vocabulary's probabilities sum to 1",
            max(sums) < _SUM_TOLERANCE,
            f"off by {max(sums):.1e} at most",
        ),
        Check(
            "scores equal the probabilities of the mixture",
            max(gaps) < _TOLERANCE and abs(average) < _MEAN_TOLERANCE,
            f"log p differs by {max(gaps):.1e}, on average by {average:.1e}",
        ),
        Check(
            "no token saw itself or a later one", max(leaks) < _TOLERANCE, f"p differs by {max(leaks):.1e}"
        ),
    ]


def _check_base(lm: ReadingModel, sample: Texts, scored: Sequence[_Scored], settings: KNNSettings) -> Check:
    """Check that model and mixture are compared on the same tokens, each token once.

    The texts are scored once more, with the model alone.

    Args:
        lm: the model.
        sample: the tokens of each sampled text.
        scored: the scores of each sampled text by the mixture.
        settings: the settings in force.
    """
    model_alone = KNNSettings(lam=0, selection=settings.selection)
    first = 0 if lm.reader.prefix else 1
    same = all(
        both.positions == alone.positions == list(range(first, len(text)))
        and bool(((both.base - alone.mixed).abs() < _TOLERANCE).all())
        for text, both, alone in zip(sample, scored, _score_texts(lm, sample, model_alone), strict=True)
    )
    tokens = sum(len(text.positions) for text in scored)
    return Check("model and mixture on the same tokens", same, f"{tokens:,} tokens")


def _replace_tokens(
    tokens: NDArray[np.uint32], vocabulary: int, rng: np.random.Generator
) -> NDArray[np.uint32]:
    """Return random tokens of the vocabulary, each different from the token at the same place."""
    offsets = rng.integers(1, vocabulary, len(tokens))
    return ((tokens.astype(np.int64) + offsets) % vocabulary).astype(np.uint32)


def _score_texts(lm: ReadingModel, texts: Texts, settings: KNNSettings) -> list[_Scored]:
    """Score texts as `evaluate` does, and return the scores of each text, sorted by position.

    Args:
        lm: the model.
        texts: the tokens of each text.
        settings: the settings in force.
    """
    log_probs = [dict[int, tuple[float, float]]() for _ in texts]
    for scores in score_texts(lm.store, lm.reader, texts, settings):
        mixed = build_mixture(settings, scores.evidence).target_log_probs(scores.lm_log_probs, scores.targets)
        columns = scores.documents, scores.positions, scores.lm_log_probs, mixed
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for document, position, base, log_prob in rows:
            log_probs[document][position] = base, log_prob
    scored = []
    for by_position in log_probs:
        positions = sorted(by_position)
        both = torch.tensor([by_position[position] for position in positions]).reshape(-1, 2)
        scored.append(_Scored(positions, both[:, 0], both[:, 1]))
    return scored


def _compute_distributions(lm: Predicts, tokens: NDArray[np.uint32], settings: KNNSettings) -> Tensor:
    """Compute the log-probability of every token of the vocabulary at each position of a text.

    Returns:
        Float32, shape (n, v). If the tokenizer has no BOS token, the first row is uniform.
    """
    reader = lm.reader
    ids = torch.tensor([[*reader.prefix, *tokens.tolist()]], device=reader.encoder.model.device)
    with torch.inference_mode():
        rows: Tensor = lm(ids, knn=settings).logits[0, :-1].float().cpu()
    if settings.is_model_alone:  # `forward` then returns the logits of the model
        rows = rows.log_softmax(-1)
    if reader.prefix:
        return rows
    return torch.cat([torch.full_like(rows[:1], 1 / rows.shape[1]).log(), rows])

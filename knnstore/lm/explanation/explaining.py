"""Why a token is likely: the two models' probabilities and the places that retrieval found."""

from collections.abc import Generator, Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import record_ids
from knnstore.lm.components import NGrams, OwnNGrams, Recent, RecentText, mixture_of
from knnstore.lm.contexts import Contexts
from knnstore.lm.explanation.crediting import Credits, Given, Mixed
from knnstore.lm.explanation.explained import DocumentEffect, Explanation, Part, TokenExplanation
from knnstore.lm.explanation.sourcing import (
    Found,
    Sources,
    found_by_keys,
    found_by_ngrams,
    found_by_own_ngrams,
    found_here,
)
from knnstore.lm.mixing import Mixture
from knnstore.lm.reading import check_tokens
from knnstore.lm.scoring import TokenScores, score_text_in_turns, score_texts
from knnstore.lm.settings import KNNSettings, ReadingModel, resolve
from knnstore.lm.substitute import Heads
from knnstore.store import Occurrence

_TURN_TOKENS = 64
"""That are explained in one turn at most; see `explain_in_turns`."""
_TURN_SOURCES = 512
"""That are named in one turn, and as many causes: each takes some 60 µs."""
_PLACES = 32
"""Of n-grams, that are looked at for each length: those that have most of the context."""


def explain(
    lm: ReadingModel, text: str, knn: KNNSettings | None = None, *, neighbors: int = 8, after: str = ""
) -> Explanation:
    """Say for each token of a text how likely both models find it, and why.

    Args:
        lm: the model.
        text: the text to explain.
        knn: settings of this call; default ``lm.knn``.
        neighbors: how many sources to name for each token; with 0 no document is named either.
        after: a text that comes before and is not explained, e.g. the prompt.

    Returns:
        An entry for each predicted token, in order, and what each document did. A notebook shows it as the
        text, colored.
    """
    reader = lm.reader
    start = len(reader.tokens(after))
    return explain_tokens(lm, reader.tokens(after + text), knn, neighbors=neighbors, start=start)


def explain_tokens(
    lm: ReadingModel,
    tokens: NDArray[np.uint32],
    knn: KNNSettings | None = None,
    *,
    neighbors: int = 8,
    start: int = 0,
) -> Explanation:
    """Do what `explain` does for a text given by its tokens, shape (n,), from one of them on."""
    settings = resolve(lm.store, knn or lm.knn)
    scored = score_texts(lm.store, lm.reader, [tokens], settings, with_sources=True)
    explained: list[TokenExplanation] = []
    turns = _explain(lm, tokens, settings, scored, neighbors, start)
    while True:
        try:
            explained += next(turns)
        except StopIteration as end:
            return Explanation(tuple(sorted(explained, key=lambda one: one.position)), end.value)


def explain_in_turns(
    lm: ReadingModel,
    tokens: NDArray[np.uint32],
    knn: KNNSettings | None = None,
    *,
    neighbors: int = 8,
    start: int = 0,
) -> Generator[list[TokenExplanation], None, tuple[DocumentEffect, ...]]:
    """Do what `explain_tokens` does in turns that each take a short time, for a server with other requests.

    The results are those of `explain_tokens`, but for rounding. Settings with pointers are not supported.

    Yields:
        After each turn the tokens that it explained; often none.

    Returns:
        What each document did to them.
    """
    settings = resolve(lm.store, knn or lm.knn)
    most = min(_TURN_TOKENS, max(1, _TURN_SOURCES // max(1, neighbors)))
    scored = score_text_in_turns(lm.store, lm.reader, tokens, settings, most)
    return (yield from _explain(lm, tokens, settings, scored, neighbors, start))


def _explain(
    lm: ReadingModel,
    tokens: NDArray[np.uint32],
    settings: KNNSettings,
    scored: Iterable[TokenScores | None],
    neighbors: int,
    start: int,
) -> Generator[list[TokenExplanation], None, tuple[DocumentEffect, ...]]:
    """Explain tokens as they are scored.

    Yields:
        For each entry of `scored` the explained tokens; then an empty list for each turn in which documents
        are credited.

    Returns:
        What each document did.
    """
    store, reader = lm.store, lm.reader
    check_tokens(tokens, reader.encoder.vocabulary, reader.tokenizer)
    heads = Heads(store, reader.encoder.model.device)
    whole = Contexts.of_documents([tokens])
    texts = reader.pieces(tokens[start:].tolist(), tokens[:start].tolist())
    credits, sources = Credits(store), Sources(store, reader)
    for scores in scored:
        explained: list[TokenExplanation] = []
        if scores is None or not (scores.positions >= start).any():
            yield explained
            continue
        mixture = mixture_of(settings, scores.evidence)
        p_knn = mixture.knn_probs(scores.targets).tolist()
        below = heads.mix_gold(settings.substitute, scores.lm_log_probs, scores.read.keys, scores.targets)
        p, p_lm = mixture.gold(below, scores.targets).exp(), scores.lm_log_probs.exp().tolist()
        p_sub: list[float | None] = [None] * len(p)
        if settings.substitute is not None:
            p_sub = heads(settings.substitute).gold_log_probs(scores.read.keys, scores.targets).exp().tolist()
        own = [component.probs(scores.targets) for component in mixture.components]
        rows = np.flatnonzero(scores.positions >= start)
        found: dict[int, list[Occurrence]] = {}
        contexts = whole.at_positions(np.zeros(len(rows), np.int64), scores.positions[rows])
        if neighbors and settings.ngrams is not None:
            places = NGrams().occurrences(store, settings, contexts, max(neighbors, _PLACES))
            found = dict(zip(rows.tolist(), places, strict=True))
        if neighbors:
            credits.add(*_to_credit(scores, mixture, rows, below.exp(), p, found))
        nearest, causes = map(
            sources.of, _places(scores, mixture, settings, contexts, rows, found, neighbors)
        )
        for row, near, giving in zip(rows.tolist(), nearest, causes, strict=True):
            position, lam = int(scores.positions[row]), float(mixture.lam[row])
            parts = _below(settings, 1 - lam, p_lm[row], p_sub[row])
            for component, weight, probs in zip(mixture.components, mixture.shares, own, strict=True):
                parts.append(Part(component.name, float(weight[row]), float(probs[row])))
            of_token = TokenExplanation(
                position=position,
                token=int(scores.targets[row]),
                text=texts[position - start],
                p_lm=p_lm[row],
                p_knn=p_knn[row],
                lam=lam,
                p=float(p[row]),
                neighbors=near,
                p_sub=p_sub[row],
                parts=tuple(parts),
                causes=giving,
            )
            explained.append(of_token)
        yield explained
    for effects in credits.documents():
        if effects is None:
            yield []
        else:
            return effects
    return ()


def _places(
    scores: TokenScores,
    mixture: Mixture,
    settings: KNNSettings,
    contexts: Contexts,
    rows: NDArray[np.int64],
    occurrences: dict[int, list[Occurrence]],
    count: int,
) -> tuple[list[list[Found]], list[list[Found]]]:
    """For some tokens the places nearest to each, and those that give most to it."""
    shares, distances = mixture.weights_in(0)[rows], scores.evidence.distances[rows]
    given = shares * _has_target(scores)[rows]
    wanted, of_store = min(count, shares.shape[1]), (scores.ids[rows], distances, shares)
    nearest = found_by_keys(*of_store, distances.topk(wanted, largest=False).indices)
    causes = found_by_keys(*of_store, given.topk(wanted).indices)
    numbers = {component.name: number for number, component in enumerate(mixture.components)}
    here = mixture.weights_in(numbers.get("cache", 0))
    own = OwnNGrams().occurrences(settings, contexts, count) if settings.own_ngrams is not None else []
    tokens, recent = (
        contexts.texts[0].astype(np.uint32, copy=False),
        scores.evidence.found.get(RecentText.name),
    )
    for at, row in enumerate(rows.tolist()):
        position, token = int(scores.positions[row]), int(scores.targets[row])
        if row in occurrences:
            more = found_by_ngrams(
                occurrences[row][:count], token, float(mixture.share_in(numbers["n-grams"])[row])
            )
            nearest[at] += more
            causes[at] += more
        if own:
            share = float(mixture.share_in(numbers["own n-grams"])[row])
            more = found_by_own_ngrams(tokens, position, own[at], share)
            nearest[at] += more
            causes[at] += more
        if isinstance(recent, Recent):
            has_token = recent.tokens[row] == token
            for found, weights in ((nearest, here[row]), (causes, here[row] * has_token)):
                found[at] += found_here(tokens, position, recent.distances[row], weights, count)
        if settings.needs_text:
            nearest[at] = sorted(nearest[at], key=lambda one: -one.share)[:count]
        giving = (one for one in causes[at] if one.token == token and one.share > 0)
        causes[at] = sorted(giving, key=lambda one: -one.share)[:count]
    return nearest, causes


def _has_target(scores: TokenScores) -> Tensor:
    """Return whether each retrieved record has the token that it was retrieved for, bool, shape (n, k)."""
    assert scores.evidence.tokens is not None
    return scores.evidence.tokens == scores.targets[:, None]


def _below(settings: KNNSettings, weight: float, p_lm: float, p_sub: float | None) -> list[Part]:
    """The parts that have what components leave."""
    if settings.substitute is None or p_sub is None:
        return [Part("model", weight, p_lm)]
    lam = settings.substitute.lam
    return [Part("model", weight * (1 - lam), p_lm), Part("substitute", weight * lam, p_sub)]


def _to_credit(
    scores: TokenScores,
    mixture: Mixture,
    rows: NDArray[np.int64],
    below: Tensor,
    p: Tensor,
    found: dict[int, list[Occurrence]],
) -> tuple[Mixed, Given]:
    """What some of the tokens are made of, as documents are credited with it."""

    def of(values: Tensor) -> NDArray[np.float64]:
        return values[rows].double().numpy()

    mixed = Mixed(
        positions=scores.positions[rows],
        ids=scores.ids[rows],
        weights=of(mixture.components[0].weights),
        hits=_has_target(scores)[rows].numpy(),
        share=of(mixture.shares[0]),
        below=of(below),
        p=of(p),
    )
    places = [
        (at, one.position, int(scores.targets[row]), float(mixture.shares[1][row]) * one.share)
        for at, row in enumerate(rows.tolist())
        for one in found.get(row, ())
    ]
    at, positions, tokens, given = zip(*places, strict=True) if places else ((), (), (), ())
    ids = record_ids(np.array(positions, np.int64), np.array(tokens, np.int64))
    return mixed, Given(np.array(at, np.int64), ids, np.array(given, np.float64))

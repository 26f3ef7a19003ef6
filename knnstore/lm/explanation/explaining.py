"""Explaining a text: both models' probabilities of each token, and the retrieved places."""

from collections.abc import Generator, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm.components import Citations, Keys, Place
from knnstore.lm.contexts import Contexts
from knnstore.lm.explanation.crediting import Credits, Given, Mixed
from knnstore.lm.explanation.explained import DocumentEffect, Explanation, Part, TokenExplanation
from knnstore.lm.explanation.sourcing import Sources
from knnstore.lm.mixing import Evidence, Mixture
from knnstore.lm.mixture import cite_places, mixture_of
from knnstore.lm.reading import check_tokens
from knnstore.lm.scoring import ReadTokens, TokenScores, score_text_in_turns, score_texts
from knnstore.lm.settings import KNNSettings, ReadingModel, resolve

_TURN_TOKENS = 64
"""Largest number of tokens that are explained in one turn; see `explain_in_turns`."""
_TURN_SOURCES = 512
"""Largest number of sources that are named in one turn, and of causes: each takes about 60 µs."""


def explain(
    lm: ReadingModel, text: str, knn: KNNSettings | None = None, *, neighbors: int = 8, after: str = ""
) -> Explanation:
    """Return for each token of a text both models' probabilities, and their sources.

    Args:
        lm: the model.
        text: the text to explain.
        knn: settings of this call; default ``lm.knn``.
        neighbors: number of sources to name for each token; 0 names no documents either.
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
    """Explain a text given by its tokens, shape (n,), from one of them on; see `explain`."""
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

    The results are those of `explain_tokens`, but for rounding.

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
    whole = Contexts.of_documents([tokens])
    texts = reader.pieces(tokens[start:].tolist(), tokens[:start].tolist())
    credits, sources = Credits(store), Sources(store, reader, tokens)
    for scores in scored:
        explained: list[TokenExplanation] = []
        if scores is None or not (scores.positions >= start).any():
            yield explained
            continue
        # 1) Mix the tokens that are explained.
        rows = np.flatnonzero(scores.positions >= start)
        at = torch.from_numpy(rows)
        read, evidence = scores.read.select_rows(at), scores.evidence.select_rows(at)
        targets, positions = read.targets, read.positions.tolist()
        mixture = mixture_of(settings, evidence)
        p_knn = mixture.knn_probs(targets).tolist()
        below = read.lm_log_probs
        p, p_lm = mixture.gold(below, targets).exp(), below.exp().tolist()
        own = [component.probs(targets) for component in mixture.components]
        # 2) Name the places that they come from.
        contexts = whole.at_positions(np.zeros(len(rows), np.int64), read.positions)
        cited = {}
        if neighbors:
            cited = cite_places(store, settings, contexts, evidence, mixture, neighbors)
        if neighbors:
            credits.add(*_to_credit(evidence, read, mixture, below.exp(), p, cited))
        nearest, causes = (
            sources.describe_places(places, positions)
            for places in _choose_places(cited, targets, settings, neighbors)
        )
        # 3) Say what each component gives.
        for row, (position, near, giving) in enumerate(zip(positions, nearest, causes, strict=True)):
            lam = float(mixture.lam[row])
            parts = [Part("model", 1 - lam, p_lm[row])]
            for component, weight, probs in zip(mixture.components, mixture.shares, own, strict=True):
                parts.append(Part(component.name, float(weight[row]), float(probs[row])))
            of_token = TokenExplanation(
                position=position,
                token=int(targets[row]),
                text=texts[position - start],
                p_lm=p_lm[row],
                p_knn=p_knn[row],
                lam=lam,
                p=float(p[row]),
                neighbors=near,
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


def _choose_places(
    cited: Mapping[str, Citations], targets: Tensor, settings: KNNSettings, count: int
) -> tuple[list[list[Place]], list[list[Place]]]:
    """Choose the places nearest to each of n tokens, and those that give most to it, of all components."""
    nearest: list[list[Place]] = [[] for _ in targets]
    causes: list[list[Place]] = [[] for _ in targets]
    for of_component in cited.values():
        for row, token in enumerate(targets.tolist()):
            nearest[row] += of_component.nearest[row][:count]
            causes[row] += [
                one for one in of_component.causes[row][:count] if one.token == token and one.share > 0
            ]
    if settings.needs_text:  # else they are in the order of their distances
        nearest = [sorted(places, key=lambda one: -one.share)[:count] for places in nearest]
    return nearest, [sorted(places, key=lambda one: -one.share)[:count] for places in causes]


def _to_credit(
    evidence: Evidence,
    read: ReadTokens,
    mixture: Mixture,
    below: Tensor,
    p: Tensor,
    cited: Mapping[str, Citations],
) -> tuple[Mixed, Given]:
    """Return what n tokens are made of, as documents are credited with it."""
    assert evidence.tokens is not None
    mixed = Mixed(
        positions=read.positions,
        ids=evidence.ids,
        weights=mixture.components[0].weights.double().numpy(),
        hits=(evidence.tokens == read.targets[:, None]).numpy(),
        share=mixture.shares[0].double().numpy(),
        below=below.double().numpy(),
        p=p.double().numpy(),
    )
    lam = mixture.lam.tolist()
    places = [
        (row, place.id, lam[row] * place.share)
        for name, of_component in cited.items()
        if name != Keys.name  # whose records are all credited, not only those named
        for row, of_token in enumerate(of_component.causes)
        for place in of_token
        if place.id >= 0
    ]
    rows, ids, given = zip(*places, strict=True) if places else ((), (), ())
    return mixed, Given(np.array(rows, np.int64), np.array(ids, np.int64), np.array(given, np.float64))

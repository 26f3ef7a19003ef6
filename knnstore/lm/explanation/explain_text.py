"""Explaining a text (`explain`): the probability of each token by component, its sources, document effects.

`_explain_scored_tokens` is the flow. `_SourceDescriber` finds the document and the text around each source,
`_DocumentEffects` computes p without each retrieved document.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Ids
from knnstore.documents import SOURCE
from knnstore.errors import ConfigError
from knnstore.lm.components import Citations, Keys, Place
from knnstore.lm.contexts import Contexts
from knnstore.lm.explanation.token_explanations import (
    THIS_TEXT,
    DocumentEffect,
    Explanation,
    Part,
    Source,
    TokenExplanation,
)
from knnstore.lm.mixing import LEAST_PROBABILITY, Evidence, Mixture
from knnstore.lm.mixture import build_mixture, cite_places
from knnstore.lm.reading import TextReader, check_tokens
from knnstore.lm.scoring import ReadTokens, TokenScores, score_text_in_turns, score_texts
from knnstore.lm.settings import KNNSettings, ReadingModel, resolve
from knnstore.store import Provenance, Reader

_TURN_TOKENS = 64
"""Largest number of tokens that are explained in one turn, a short piece of work after which a server can do
other work."""
_TURN_SOURCES = 512
"""Largest number of neighbors, and largest number of causes, that are described in one turn. Describing one
takes about 60 µs."""
_TOKENS_BEFORE, _TOKENS_AFTER = 16, 8
"""Number of tokens around a source in the explained text; the same as the default of `Reader.provenance`."""
_MIN_CHANGE = np.log(1.01)
"""Change of log p above which a document counts as affecting a token."""
_TURN_DOCUMENTS = 1000
"""Number of documents whose names are looked up in one turn."""
_ROUNDING = 1e-6
"""If the remaining weights sum to less than this fraction of p_kNN, the sum counts as 0, because the weights
are float32."""

_Floats = NDArray[np.float64]


def explain(
    lm: ReadingModel,
    text: str,
    knn: KNNSettings | None = None,
    *,
    neighbors: int = 8,
    after: str = "",
    source: str | None = None,
) -> Explanation:
    """Explain the probability of each token of a text by components, sources and documents.

    A component is a memory that is mixed with the model, such as the keys or n-grams. A source is a place
    that a prediction comes from: a stored record, or an earlier token of the text.

    Args:
        lm: the model.
        text: the text to explain.
        knn: settings of this call; default ``lm.knn``.
        neighbors: for each token, the largest number of neighbors (nearest records) and the largest number of
            causes (records that predict the token). If 0, effects of documents are not computed either.
        after: the text that precedes `text` and is not explained, e.g. the prompt.
        source: the source of the whole text for an encoder-decoder model, e.g. the sentence that `text`
            translates; None for a causal model.

    Returns:
        The explained tokens in order, without the first token of a text if the tokenizer has no BOS token;
        and the effect of each document. A notebook shows the text, colored by the store's share.

    Raises:
        InputError: a token is not in the vocabulary of the model, or the model cannot read the source.
        ConfigError: an encoder-decoder model got no source, or a causal model got one.
    """
    reader = lm.reader
    if source is not None and not reader.reads_pairs:
        raise ConfigError("a causal model has no source: give the preceding text as `after`")
    start = len(reader.tokenize(after)) - len(reader.document_tokenizer.end)
    read = None if source is None else reader.document_tokenizer.tokenize_sources([source])[0]
    tokens = reader.tokenize(after + text)
    return explain_tokens(lm, tokens, knn, neighbors=neighbors, start=start, source=read)


def explain_tokens(
    lm: ReadingModel,
    tokens: NDArray[np.uint32],
    knn: KNNSettings | None = None,
    *,
    neighbors: int = 8,
    start: int = 0,
    source: NDArray[np.uint32] | None = None,
) -> Explanation:
    """Explain the probability of each token of a tokenized text, by components, sources and documents.

    A component is a memory that is mixed with the model, such as the keys or n-grams. A source is a place
    that a prediction comes from: a stored record, or an earlier token of the text.

    Args:
        lm: the model.
        tokens: tokens of the text, shape (n,).
        knn: settings of this call; default ``lm.knn``.
        neighbors: for each token, the largest number of neighbors (nearest records) and the largest number of
            causes (records that predict the token). If 0, effects of documents are not computed either.
        start: index of the first token to explain; the tokens before are only context.
        source: tokens of the source for an encoder-decoder model, shape (m,); None for a causal model.

    Returns:
        The explained tokens in order, and the effect of each document.
    """
    settings, sources = resolve(lm.store, knn or lm.knn), None if source is None else [source]
    scored = score_texts(lm.store, lm.reader, [tokens], settings, sources=sources, with_record_ids=True)
    explained: list[TokenExplanation] = []
    turns = _explain_scored_tokens(lm, tokens, settings, scored, neighbors, start)
    while True:
        try:
            explained += next(turns)
        except StopIteration as end:
            return Explanation(tuple(sorted(explained, key=lambda token: token.position)), end.value)


def explain_in_turns(
    lm: ReadingModel,
    tokens: NDArray[np.uint32],
    knn: KNNSettings | None = None,
    *,
    neighbors: int = 8,
    start: int = 0,
    source: NDArray[np.uint32] | None = None,
) -> Generator[list[TokenExplanation], None, tuple[DocumentEffect, ...]]:
    """Explain the tokens of a text in turns.

    A turn is a short piece of work; between two turns a server can do other work.

    The results equal those of `explain_tokens`, except for rounding.

    Args:
        lm: the model.
        tokens: tokens of the text, shape (n,).
        knn: settings of this call; default ``lm.knn``.
        neighbors: for each token, the largest number of neighbors (nearest records) and the largest number of
            causes (records that predict the token). If 0, effects of documents are not computed either.
        start: index of the first token to explain; the tokens before are only context.
        source: tokens of the source for an encoder-decoder model, shape (m,); None for a causal model.

    Yields:
        At the end of each turn the tokens that were explained in this turn; often an empty list.

    Returns:
        The effect of each document.
    """
    settings = resolve(lm.store, knn or lm.knn)
    max_tokens = min(_TURN_TOKENS, max(1, _TURN_SOURCES // max(1, neighbors)))
    scored = score_text_in_turns(lm.store, lm.reader, tokens, settings, max_tokens, source)
    return (yield from _explain_scored_tokens(lm, tokens, settings, scored, neighbors, start))


def _explain_scored_tokens(
    lm: ReadingModel,
    tokens: NDArray[np.uint32],
    settings: KNNSettings,
    scored: Iterable[TokenScores | None],
    neighbors: int,
    start: int,
) -> Generator[list[TokenExplanation], None, tuple[DocumentEffect, ...]]:
    """Explain the tokens of a text, one group of tokens at a time, as soon as the group is scored.

    Args:
        lm: the model.
        tokens: tokens of the text, shape (n,).
        settings: the settings in force.
        scored: the scores of groups of tokens, with the ids of the retrieved records; None for a turn (short
            piece of work) in which nothing was scored.
        neighbors: for each token, the largest number of neighbors (nearest records) and the largest number of
            causes (records that predict the token). If 0, effects of documents are not computed either.
        start: index of the first token to explain.

    Yields:
        For each item of `scored` the explained tokens; then an empty list for each turn in which names of
        documents are looked up.

    Returns:
        The change of the text's log-probability that each document caused; empty if `neighbors` is 0.
    """
    store, reader = lm.store, lm.reader
    check_tokens(tokens, reader.encoder.vocabulary, reader.tokenizer)
    whole = Contexts.from_documents([tokens])
    texts = reader.decode_pieces(tokens[start:].tolist(), tokens[:start].tolist())
    effects, sources = _DocumentEffects(store), _SourceDescriber(store, reader, tokens)
    for scores in scored:
        explained: list[TokenExplanation] = []
        if scores is None or not (scores.positions >= start).any():
            yield explained
            continue
        # 1) Mix the tokens that are explained.
        rows = np.flatnonzero(scores.positions >= start)
        row_tensor = torch.from_numpy(rows)
        read, evidence = scores.read.select_rows(row_tensor), scores.evidence.select_rows(row_tensor)
        targets, positions = read.targets, read.positions.tolist()
        mixture = build_mixture(settings, evidence)
        p_knn = mixture.knn_probs(targets).tolist()
        lm_log_probs = read.lm_log_probs
        p, p_lm = mixture.target_log_probs(lm_log_probs, targets).exp(), lm_log_probs.exp().tolist()
        component_probs = [component.token_probs(targets) for component in mixture.components]
        # 2) Find the places that the predictions come from, and the documents that contain them.
        contexts = whole.with_positions(np.zeros(len(rows), np.int64), read.positions)
        cited = {}
        if neighbors:
            cited = cite_places(store, settings, contexts, evidence, mixture, neighbors)
            effects.add_tokens(
                *_separate_contributions(evidence, read, mixture, lm_log_probs.exp(), p, cited)
            )
        nearest, causes = (
            sources.describe_places(places, positions)
            for places in _choose_places(cited, targets, settings, neighbors)
        )
        # 3) List the contribution of each component.
        for row, (position, near, predicting) in enumerate(zip(positions, nearest, causes, strict=True)):
            lam = float(mixture.lam[row])
            parts = [Part("model", 1 - lam, p_lm[row])]
            for component, weight, probs in zip(
                mixture.components, mixture.shares, component_probs, strict=True
            ):
                parts.append(Part(component.name, float(weight[row]), float(probs[row])))
            explanation = TokenExplanation(
                position=position,
                token=int(targets[row]),
                text=texts[position - start],
                p_lm=p_lm[row],
                p_knn=p_knn[row],
                lam=lam,
                p=float(p[row]),
                neighbors=near,
                parts=tuple(parts),
                causes=predicting,
            )
            explained.append(explanation)
        yield explained
    # 4) Look up the documents, which takes several turns if there are thousands.
    for document_effects in effects.iterate_until_effects():
        if document_effects is None:
            yield []
        else:
            return document_effects
    return ()


def _choose_places(
    cited: Mapping[str, Citations], targets: Tensor, settings: KNNSettings, count: int
) -> tuple[list[list[Place]], list[list[Place]]]:
    """Choose the nearest places and the causes of each token among the places of all components.

    A place is a stored record or an earlier token of the text; a cause is a place that predicts the token.

    Args:
        cited: the places of each component, by its name.
        targets: the explained tokens, int64, shape (n,).
        settings: the settings in force.
        count: largest number of nearest places, and of causes, of each token.

    Returns:
        Two lists with one item for each token. First the nearest places, which may predict any token. They
        are sorted by distance, or by share, the largest first, if the settings use other components than the
        keys. Then the causes, the largest share first.
    """
    nearest: list[list[Place]] = [[] for _ in targets]
    causes: list[list[Place]] = [[] for _ in targets]
    for citations in cited.values():
        for row, token in enumerate(targets.tolist()):
            nearest[row] += citations.nearest[row][:count]
            causes[row] += [
                place for place in citations.causes[row][:count] if place.token == token and place.share > 0
            ]
    if settings.needs_text:  # else the keys are the only component, and the places are sorted by distance
        nearest = [sorted(places, key=lambda place: -place.share)[:count] for places in nearest]
    return nearest, [sorted(places, key=lambda place: -place.share)[:count] for places in causes]


class _MixtureParts(NamedTuple):
    """Values for computing the probabilities of n tokens again without some retrieved records."""

    positions: NDArray[np.int64]
    """Positions of the tokens in the text, shape (n,)."""
    ids: Ids
    """Ids of the records retrieved with keys, shape (n, k); -1 if missing."""
    weights: _Floats
    """Weight of each record in p_kNN, shape (n, k)."""
    is_target: NDArray[np.bool_]
    """True for records that predict the explained token, shape (n, k)."""
    key_share: _Floats
    """Weight of p_kNN in the whole mixture, shape (n,)."""
    fallback: _Floats
    """Probability by the model, used in place of p_kNN if every record is removed, shape (n,)."""
    p: _Floats
    """Probability of each token in the mixture, shape (n,)."""


class _PlaceContributions(NamedTuple):
    """m records that components other than the keys (such as n-grams) retrieved, and their parts of p.

    p is the probability of the explained token in the mixture.
    """

    rows: NDArray[np.int64]
    """For each record, the index of the explained token among the n tokens, shape (m,)."""
    ids: Ids
    """Record ids, shape (m,)."""
    p: _Floats
    """The part of the token's p that the record contributes, shape (m,)."""


def _separate_contributions(
    evidence: Evidence,
    read: ReadTokens,
    mixture: Mixture,
    p_lm: Tensor,
    p: Tensor,
    cited: Mapping[str, Citations],
) -> tuple[_MixtureParts, _PlaceContributions]:
    """Split the probabilities of n tokens into contributions of single records, for `_DocumentEffects`.

    Args:
        evidence: the look-up results for the tokens, with record ids.
        read: the model's predictions of the tokens.
        mixture: the mixture of the evidence.
        p_lm: probability of each token by the model, shape (n,).
        p: probability of each token in the mixture, shape (n,).
        cited: the places of each component, by its name.

    Returns:
        All records retrieved with keys, and the cited records of the other components. Earlier places of the
        text itself are left out.
    """
    assert evidence.tokens is not None
    mixed = _MixtureParts(
        positions=read.positions,
        ids=evidence.ids,
        weights=mixture.components[0].weights.double().numpy(),
        is_target=(evidence.tokens == read.targets[:, None]).numpy(),
        key_share=mixture.shares[0].double().numpy(),
        fallback=p_lm.double().numpy(),
        p=p.double().numpy(),
    )
    lam = mixture.lam.tolist()
    contributions = [
        (row, place.id, lam[row] * place.share)
        for name, citations in cited.items()
        if name != Keys.name  # all records of the keys are in `mixed`, not only the cited records
        for row, places in enumerate(citations.causes)
        for place in places
        if place.id >= 0
    ]
    rows, ids, probs = zip(*contributions, strict=True) if contributions else ((), (), ())
    return mixed, _PlaceContributions(
        np.array(rows, np.int64), np.array(ids, np.int64), np.array(probs, np.float64)
    )


class _DocumentEffects:
    """Computes how much the probability of each token of a text changes without each retrieved document.

    Args:
        store: the store in which the records were retrieved.
    """

    def __init__(self, store: Reader) -> None:
        self._store = store
        self._batches: list[tuple[Ids, NDArray[np.int64], NDArray[np.int64], _Floats, _Floats]] = []
        """For each batch of explained tokens, the pairs of a document and a token that it affects, as five
        arrays: the id of a record of the document, the document's number, the token's position, p, and p
        without the document."""

    def add_tokens(self, mixed: _MixtureParts, places: _PlaceContributions) -> None:
        """Compute the probability of n tokens without each document, and keep changes above `_MIN_CHANGE`.

        Records of removed documents are ignored.

        Args:
            mixed: the records that were retrieved with keys.
            places: the records that other components retrieved.
        """
        # 1) List all records with a live document: number of the token, of the document, weight,
        # contribution.
        key_documents = self._store.document_numbers(mixed.ids)
        rows, columns = np.nonzero((key_documents >= 0) & (mixed.weights > 0))
        weights = mixed.weights[rows, columns]
        target_weights = weights * mixed.is_target[rows, columns]
        place_documents = self._store.document_numbers(places.ids)
        is_live = place_documents >= 0
        zeros = np.zeros(int(is_live.sum()))
        documents = np.concatenate([key_documents[rows, columns], place_documents[is_live]])
        base = int(documents.max(initial=0)) + 1
        # 2) Sum them for each pair of token and document. With a million records, `np.unique` that also
        # returns the index of each pair's first record would sort in another, slow way.
        pairs, pair_of_record = np.unique(
            np.concatenate([rows, places.rows[is_live]]) * base + documents, return_inverse=True
        )
        ids = np.empty(len(pairs), np.int64)
        ids[pair_of_record] = np.concatenate([mixed.ids[rows, columns], places.ids[is_live]])
        document_weight, document_target_weight, contribution = (
            np.bincount(pair_of_record, values, len(pairs))
            for values in (
                np.concatenate([weights, zeros]),
                np.concatenate([target_weights, zeros]),
                np.concatenate([np.zeros(len(rows)), places.p[is_live]]),
            )
        )
        row, number = np.divmod(pairs, base)
        # 3) Compute p without the document of each pair.
        p = mixed.p[row]
        p_knn = (mixed.weights * mixed.is_target).sum(1)[row]
        remaining = mixed.weights.sum(1)[row] - document_weight
        p_knn_without = np.where(
            remaining > _ROUNDING,
            (p_knn - document_target_weight) / np.maximum(remaining, _ROUNDING),
            mixed.fallback[row],
        )
        changed = p + mixed.key_share[row] * (np.clip(p_knn_without, 0, 1) - p_knn)
        without = np.where(document_weight > 0, changed, p) - contribution
        without = np.maximum(without, LEAST_PROBABILITY)
        is_affected = np.abs(np.log(np.maximum(p, LEAST_PROBABILITY) / without)) > _MIN_CHANGE
        self._batches.append(
            (
                ids[is_affected],
                number[is_affected],
                mixed.positions[row[is_affected]],
                p[is_affected],
                without[is_affected],
            )
        )

    def iterate_until_effects(self) -> Iterator[tuple[DocumentEffect, ...] | None]:
        """Look up the names of the affecting documents in turns, and yield all effects at the end.

        Yields:
            None after each thousand documents, but not after the last ones. Then, once, a tuple with the
            effect of each document, the largest gain first. A document that has been removed meanwhile is
            left out.
        """
        if not any(len(ids) for ids, *_ in self._batches):
            yield ()
            return
        ids, numbers, positions, p, without = map(np.concatenate, zip(*self._batches, strict=True))
        order = np.lexsort((positions, numbers))
        starts = np.unique(numbers[order], return_index=True)[1]
        groups, effects = np.split(order, starts[1:]), list[DocumentEffect]()
        for start in range(0, len(groups), _TURN_DOCUMENTS):
            if start:
                yield None
            turn = groups[start : start + _TURN_DOCUMENTS]
            places = self._store.provenance(ids[[group[0] for group in turn]], before=0, after=0)
            effects += [
                DocumentEffect(
                    place.document,
                    place.domain,
                    tuple(positions[group].tolist()),
                    tuple(without[group].tolist()),
                    float(np.log(np.maximum(p[group], LEAST_PROBABILITY) / without[group]).sum()),
                )
                for place, group in zip(places, turn, strict=True)
                if place is not None
            ]
        yield tuple(sorted(effects, key=lambda effect: (-effect.gain, effect.domain, effect.document)))


class _SourceDescriber:
    """Converts places (record ids, or positions in the text) to sources with document names and texts.

    The texts around a record are decoded once and cached.

    Args:
        store: the store in which the records were retrieved.
        reader: the object that decodes tokens.
        tokens: tokens of the explained text, shape (n,).
    """

    def __init__(self, store: Reader, reader: TextReader, tokens: NDArray[np.uint32]) -> None:
        self._store = store
        self._reader = reader
        self._tokens = tokens
        self._texts: dict[int, tuple[str, str, str]] = {}
        self._source_texts: dict[int, str] = {}
        """The source of each document that was cited, by the document's number."""

    def describe_places(
        self, places_of_tokens: Sequence[Sequence[Place]], positions: Sequence[int]
    ) -> list[tuple[Source, ...]]:
        """Return the sources of several tokens: the places that support each token, with their documents.

        A place is in a stored document, or earlier in the explained text itself. Places in documents that
        have been removed are left out.

        Args:
            places_of_tokens: the places of each token.
            positions: positions of the tokens in the explained text.
        """
        ids = np.unique(np.array([place.id for places in places_of_tokens for place in places], np.int64))
        provenance = dict(zip(ids.tolist(), self._store.provenance(ids), strict=True))
        source_texts = self._read_source_texts(ids) if self._reader.reads_pairs else {}
        sources = []
        for places, position in zip(places_of_tokens, positions, strict=True):
            origins = [
                self._locate_in_text(place.position, position)
                if place.position >= 0
                else provenance[place.id]
                for place in places
            ]
            sources.append(
                tuple(
                    self._make_source(origin, place, source_texts.get(place.id))
                    for origin, place in zip(origins, places, strict=True)
                    if origin is not None
                )
            )
        return sources

    def _locate_in_text(self, index: int, end: int) -> Provenance:
        """Return the token at `index` of the explained text, with the tokens around it.

        Args:
            index: index of the token.
            end: position of the explained token. The text after the token ends before this position, so that
                it shows no token that the model did not know yet.
        """
        continuation = self._tokens[index + 1 : min(index + 1 + _TOKENS_AFTER, end)]
        context = self._tokens[max(0, index - _TOKENS_BEFORE) : index]
        return Provenance(THIS_TEXT, "", index, int(self._tokens[index]), context, continuation)

    def _read_source_texts(self, ids: Ids) -> dict[int, str]:
        """Return for each record the source of its document; records of removed documents are left out.

        Args:
            ids: record ids, shape (n,).
        """
        documents = self._store.document_numbers(ids).tolist()
        new = {number for number in documents if number >= 0} - self._source_texts.keys()
        for number, metadata in self._store.metadata(new).items():
            self._source_texts[number] = metadata[SOURCE]
        pairs = zip(ids.tolist(), documents, strict=True)
        return {id: self._source_texts[number] for id, number in pairs if number in self._source_texts}

    def _make_source(self, origin: Provenance, place: Place, source_text: str | None) -> Source:
        """Create a `Source` (document, share and texts around it) from a place that was cited.

        Args:
            origin: document, position and tokens around the place.
            place: the place, with its share.
            source_text: the source of the document, if the document is a pair.
        """
        texts = self._texts.get(place.id)
        if texts is None:
            texts = self._decode_around(origin)
            if place.id >= 0:
                self._texts[place.id] = texts
        context, text, continuation = texts
        return Source(
            origin.token,
            text,
            place.share,
            place.distance,
            origin.document,
            origin.domain,
            origin.position,
            context,
            continuation,
            place.matched,
            place.component,
            source_text,
        )

    def _decode_around(self, origin: Provenance) -> tuple[str, str, str]:
        """Return the text before a token, the text of the token, and the text after it.

        All tokens are decoded together, because the tokens before decide whether a token's text begins with a
        space. A character may span several tokens. If some of them are missing, the first two texts do not
        contain the character.

        Args:
            origin: the token and the tokens around it.
        """
        before, after = origin.context.tolist(), origin.continuation.tolist()
        context, up_to_token = (
            self._reader.decode(tokens).rstrip("\ufffd") for tokens in (before, [*before, origin.token])
        )
        whole = self._reader.decode([*before, origin.token, *after])
        return context, up_to_token[len(context) :], whole[len(up_to_token) :]

"""Comparing places in the model where keys are captured, and numbers of states in a key, on a sample of text.

Two thirds of the documents are stored in memory, and the rest is held out. One pass of the model computes the
keys at all places. Then the nearest stored keys of every held-out token are found for each place, by
exhaustive search. k, T and λ are fitted on one half of the held-out documents and evaluated on the other
half, as `calibrate` does. No store is created.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from knnstore.datastore import Keys, Metric, convert_to_stored_precision, pairwise_distances
from knnstore.documents import OnBad, TextDocument
from knnstore.errors import ConfigError, InputError
from knnstore.lm.calibration import (
    MIN_DOCUMENTS,
    MIN_TOKENS,
    Candidate,
    Judge,
    ScoredText,
    compare_candidates,
)
from knnstore.lm.keys import (
    FINAL_PLACES,
    LAYER_PLACES,
    Joining,
    KeyCapture,
    KeyLocation,
    count_layers,
    fit_projection,
    locate,
)
from knnstore.lm.mixing import Evidence, NeighborSums
from knnstore.lm.reading import Encoder, TextReader, choose_window, sample_tokens
from knnstore.lm.scoring import Interval
from knnstore.progress import Progress

SAMPLE_TOKENS = 30_000
MOST_NEIGHBORS = 1024

_EVERY = 3  # of so many documents one is held out
_LEAST_TEXTS = 48  # documents are cut where fewer would fill the sample
_DISTANCES = 1 << 24  # in memory at once


@dataclass(frozen=True, slots=True)
class Probed:
    """One kind of keys that was tried (place in the model, metric, size), with its held-out perplexity."""

    key: str
    """Name of the place in the model, as the option ``--key`` takes it."""
    location: str
    """Canonical name of the place."""
    metric: str
    """``l2`` or ``ip``."""
    dim: int
    """Number of components of a key, after projection."""
    states: int
    """Number of hidden states in a key."""
    fitted: Candidate
    """The fitted settings with the best fixed T and λ, at the best k."""
    change: Interval | None = None
    """Perplexity with several states in a key, divided by the perplexity with one state; None for one
    state."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of `probe_keys`: all kinds of keys on one sample."""

    stored: int
    """Number of stored tokens."""
    held_out: int
    """Number of held-out tokens."""
    documents: int
    """Number of held-out documents."""
    base: Interval
    """Perplexity of the model alone."""
    candidates: tuple[Probed, ...]
    """All kinds of keys, the lowest perplexity first."""

    @property
    def best(self) -> Probed | None:
        """The kind of keys with the lowest perplexity.

        None if it is not better than the model beyond chance.
        """
        first = self.candidates[0]
        return first if first.fitted.change.high < 1 else None


def default_keys(model: PreTrainedModel) -> list[str]:
    """Return the names of all places to compare: in a model's last two layers, and after the last layer.

    Each place has one name.
    """
    names = [*LAYER_PLACES, *FINAL_PLACES]
    if count_layers(model) > 1:
        names += [f"{name}@-2" for name in LAYER_PLACES]
    found: dict[KeyLocation, str] = {}
    for name in names:
        with suppress(ConfigError):  # not in this model
            found.setdefault(locate(model, name), name)
    return list(found.values())


def probe_keys(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[TextDocument],
    *,
    keys: Sequence[str] | None = None,
    metrics: Sequence[str] = (Metric.L2, Metric.IP),
    states: Sequence[int] = (2, 3),
    dims: Sequence[int] = (),
    tokens: int = SAMPLE_TOKENS,
    max_length: int | None = None,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Probe:
    """Compare kinds of keys on a sample of text: places, metrics, numbers of states, projections.

    The comparison of places is that of Khandelwal et al. 2020, table 5.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: the model's tokenizer.
        documents: documents like the documents to be stored; a random sample of them is used.
        keys: names of places in the model where keys are captured, as `locate` takes them; default
            `default_keys`.
        metrics: ``l2``, ``ip`` or both.
        states: numbers of hidden states in a key to try at the best place.
        dims: numbers of components to which the best keys are projected.
        tokens: number of tokens of the sample.
        max_length: largest number of tokens in a window; default is the model's limit.
        on_bad: called for each document of the sample with a token that the model does not have; the document
            is then left out. With None the first bad document raises an error.
        progress: receives the number of tokens of each batch, and each compared kind of keys.

    Raises:
        ConfigError: a place, a metric or a number of components is not possible.
        InputError: there is too little text.
    """
    for metric in metrics:
        if metric not in list(Metric):
            raise ConfigError(f"metric must be one of {', '.join(Metric)}, got {metric!r}")
    shown = progress or Progress()
    places = {key: locate(model, key) for key in keys or default_keys(model)}
    window = choose_window(model, max_length)
    # 1) Sample documents, and hold out every third.
    encoder = Encoder(model, next(iter(places.values())))
    reader = TextReader(encoder, tokenizer, window, max(1, window // 2))
    texts = sample_tokens(
        reader, documents, tokens, longest=max(1, tokens // _LEAST_TEXTS), on_bad=on_bad
    ).texts
    held_out = texts[_EVERY - 1 :: _EVERY]
    stored = [text for at, text in enumerate(texts) if at % _EVERY != _EVERY - 1]
    if len(held_out) < MIN_DOCUMENTS or sum(map(len, held_out)) < MIN_TOKENS:
        raise InputError(
            f"{len(texts):,} documents of {sum(map(len, texts)):,} tokens are too little: the held-out "
            f"third must have at least {MIN_DOCUMENTS} documents and {MIN_TOKENS:,} tokens"
        )
    # 2) Run the model once, and capture the keys at all places.
    shown.start("reading", total=sum(map(len, texts)))
    store = _capture_keys(reader, stored, places, shown, half=True)
    text = _capture_keys(reader, held_out, places, shown, half=False)
    joined = sorted(set(states) - {1})
    shown.start("comparing", total=len(places) * len(metrics) + len(joined) + len(dims), unit="key")
    probed: list[Probed] = []
    base: Interval | None = None

    def judge(
        key: str, metric: str, sample: _Sample, states: int = 1, one_state: Candidate | None = None
    ) -> None:
        """Evaluate one kind of keys, and append the result to `probed`.

        `one_state` is the result with one state for each key, to which a kind with several states is
        compared.
        """
        nonlocal base
        rows, queries = (torch.from_numpy(array.astype(np.float32)).to(model.device) for array in sample)
        distances, nearest = nearest_keys(queries, rows, min(MOST_NEIGHBORS, len(rows)), metric)
        hits = torch.from_numpy(store.gold)[nearest] == torch.from_numpy(text.gold)[:, None]
        documents = torch.from_numpy(text.documents)
        evidence = Evidence(text.lm_max, [NeighborSums(distances, hits=hits)])
        scored = ScoredText(text.lm_log_probs, documents, evidence)
        compared = compare_candidates(scored, fits={})
        base, best, change = compared.base, compared.best, None
        if one_state is not None:
            _, change = Judge(replace(scored, lm_log_probs=one_state.log_probs))(best.log_probs)
        probed.append(Probed(key, str(places[key]), metric, rows.shape[1], states, best, change))
        shown.advance(1)

    # 3) Compare all places and metrics, with one state for each key.
    for key in places:
        for metric in metrics:
            judge(key, metric, _Sample(store.keys[key], text.keys[key]))
    # 4) At the best place, try several states, then projections.
    single = min(probed, key=_get_perplexity)
    key, metric, one_state = single.key, single.metric, single.fitted
    samples = {1: _Sample(store.keys[key], text.keys[key])}
    for n in joined:
        reader = replace(reader, encoder=Encoder(model, places[key], Joining.from_state_count(n)))
        samples[n] = _Sample(
            convert_to_stored_precision(_compute_keys(reader, stored)), _compute_keys(reader, held_out)
        )
        judge(key, metric, samples[n], n, one_state)
    best = min(probed, key=_get_perplexity).states
    for dim in dims:
        judge(key, metric, samples[best].project(dim, metric), best, one_state if best > 1 else None)
    shown.finish()
    assert base is not None
    probed.sort(key=_get_perplexity)
    return Probe(len(store.gold), len(text.gold), len(held_out), base, tuple(probed))


class _Sample(NamedTuple):
    """Keys of one kind (place, number of states, size): of the stored text and of the held-out text."""

    stored: Keys
    """Keys of the stored text, float16 as in stores, shape (n, d)."""
    asked: Keys
    """Query vectors of the held-out text, float32, shape (m, d)."""

    def project(self, dim: int, metric: str) -> "_Sample":
        """Project keys and query vectors to `dim` components by PCA, fitted on the stored keys."""
        stored = self.stored.astype(np.float32)
        projection, _ = fit_projection(stored, dim, metric, keys_per_direction=1)  # what it loses is judged
        projected, asked = (projection(torch.from_numpy(array)).numpy() for array in (stored, self.asked))
        return _Sample(convert_to_stored_precision(projected), asked)


def _compute_keys(reader: TextReader, texts: Sequence[NDArray[np.uint32]]) -> Keys:
    """Compute the key of every target token with the reader's encoder, shape (n, d).

    The tokens have the same order as in the result of `_capture_keys`.
    """
    keys = [
        reader.encoder.compute_keys(batch.input_ids, batch.at).cpu().numpy()
        for batch in reader.batch_windows(texts)
    ]
    return np.concatenate(keys)


class _CapturedKeys(NamedTuple):
    """Keys (at several places) and log-probabilities of n target tokens."""

    keys: Mapping[str, Keys]
    """Keys at each place, by its name, shape (n, d)."""
    gold: NDArray[np.int64]
    """Target tokens, shape (n,)."""
    lm_log_probs: Tensor
    """log p_LM of each target token, float32, shape (n,)."""
    lm_max: Tensor
    """log p_LM of the most probable token, float32, shape (n,)."""
    documents: NDArray[np.int64]
    """Index of each token's document, shape (n,)."""


def _capture_keys(
    reader: TextReader,
    texts: Sequence[NDArray[np.uint32]],
    places: Mapping[str, KeyLocation],
    progress: Progress,
    *,
    half: bool,
) -> _CapturedKeys:
    """Run the model once over texts, and capture the keys at all places.

    Args:
        reader: runs the model.
        texts: token ids of each text.
        places: the places, by name.
        progress: receives the number of tokens of each batch.
        half: True to convert keys to float16, as stores do.
    """
    encoder = reader.encoder
    parts: dict[str, list[Keys]] = {key: [] for key in places}
    gold, documents, log_probs = [], [], []
    for batch in reader.batch_windows(texts):
        with ExitStack() as capturing:
            captures = {
                key: capturing.enter_context(KeyCapture(encoder.model, place))
                for key, place in places.items()
            }
            states = encoder.encode(batch.input_ids, batch.at).states
        for key, capture in captures.items():
            keys = capture.take_keys(*batch.input_ids.shape).flatten(0, 1)[batch.at]
            batch_keys = keys.float().cpu().numpy()
            parts[key].append(convert_to_stored_precision(batch_keys) if half else batch_keys)
        gold.append(batch.gold)
        documents.append(batch.documents)
        log_probs.append(encoder.log_probs(states, batch.gold))
        progress.advance(len(batch.at))
    return _CapturedKeys(
        {key: np.concatenate(part) for key, part in parts.items()},
        np.concatenate(gold),
        torch.cat([part.gold.cpu() for part in log_probs]),
        torch.cat([part.best.cpu() for part in log_probs]),
        np.concatenate(documents),
    )


def nearest_keys(queries: Tensor, keys: Tensor, k: int, metric: str) -> tuple[Tensor, Tensor]:
    """Find the k nearest keys of each query by exhaustive search.

    Args:
        queries: query vectors, shape (q, d).
        keys: the keys, shape (n, d), n >= k.
        k: number of keys.
        metric: ``l2`` or ``ip``.

    Returns:
        Distances, float32, ascending, and row numbers in `keys`, int64; both of shape (q, k), on the CPU.
    """
    blocks = torch.split(queries, max(1, _DISTANCES // len(keys)))
    nearest = [pairwise_distances(block, keys, metric).topk(k, largest=False) for block in blocks]
    distances, rows = zip(*((part.values.cpu(), part.indices.cpu()) for part in nearest), strict=True)
    return torch.cat(distances), torch.cat(rows)


def _get_perplexity(probed: Probed) -> float:
    """Return the held-out perplexity of a kind of keys; used as a sort key."""
    return probed.fitted.held_out.ppl

"""Judging sides on a text: the log-probability of each target token, and whether it is the most probable."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from knnstore.documents import TextDocument
from knnstore.lm import KNNLMForCausalLM, KNNSettings, NGramSettings
from knnstore.lm.batch import Batch
from knnstore.lm.components import Form
from knnstore.lm.contexts import DocumentTexts
from knnstore.lm.mixing import Evidence, compute_entropy
from knnstore.lm.mixture import build_mixture, look_up

_ROWS = 256
"""Positions whose distributions over the vocabulary are in memory at once."""
_RIGHT = " right"


class TokenPlaces(NamedTuple):
    """The n target tokens of a text, sorted by document and position; int64, shapes (n,)."""

    documents: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]


def judge(
    lm: KNNLMForCausalLM, sides: Mapping[str, KNNSettings], documents: Sequence[TextDocument]
) -> tuple[TokenPlaces, dict[str, NDArray[Any]]]:
    """Score documents with several settings of one model and store, over the whole vocabulary.

    Args:
        lm: the model with its store.
        sides: settings without unset fields, by the name of the side; all select the whole store.
        documents: the documents.

    Returns:
        The target tokens. And for each side, in the order of the target tokens, the log-probabilities under
        its name, float32, shape (n,), and under `right_of` its name whether the most probable token is the
        target, bool, shape (n,).
    """
    reader, store = lm.reader, lm.store
    tokens = reader.tokenize_documents(documents)
    following = {
        name: DocumentTexts(tokens, reader.prefix, settings.cache.size if settings.cache else 0)
        for name, settings in sides.items()
    }
    places: list[TokenPlaces] = []
    parts: dict[str, list[NDArray[Any]]] = {key: [] for name in sides for key in (name, right_of(name))}
    for batch in reader.batch_windows(tokens):
        encoded = reader.encoder.encode(batch.input_ids, batch.at)
        places.append(TokenPlaces(batch.documents, batch.positions, batch.gold))
        targets = torch.from_numpy(batch.gold)
        contexts = {
            name: texts.append_keys(encoded.keys, batch.documents, batch.positions)
            for name, texts in following.items()
        }
        for start in range(0, len(targets), _ROWS):
            rows = slice(start, start + _ROWS)
            with torch.inference_mode():
                lm_log_probs = reader.encoder.head(encoded.states[rows]).float().log_softmax(1)
            positions = Batch(
                encoded.keys[rows],
                lm_log_probs.amax(1),
                compute_entropy(lm_log_probs, lm_log_probs.exp()),
                store.identity.vocab_size,
                targets=targets[rows],
            )
            # The predictions of n-grams do not depend on their weight, so they are looked up once; once more
            # for a gate, which also takes how well they have predicted the text so far.
            counted: dict[tuple[int, bool], Evidence] = {}
            for name, settings in sides.items():
                asked = replace(positions, contexts=contexts[name].select_rows(rows))
                evidence = look_up(store, replace(settings, ngrams=None), asked, Form.DISTRIBUTION)
                if settings.ngrams is not None:
                    order, gate = settings.ngrams.order, settings.gate
                    if (order, gate is not None) not in counted:
                        alone = KNNSettings(k=1, lam=0.0, ngrams=NGramSettings(order), gate=gate)
                        of_ngrams = look_up(store, alone, asked, Form.DISTRIBUTION)
                        counted[order, gate is not None] = of_ngrams
                    of_ngrams = counted[order, gate is not None]
                    evidence = replace(evidence, found={**of_ngrams.found, **evidence.found})
                found = build_mixture(settings, evidence).score_targets(lm_log_probs, targets[rows], 1)
                parts[name].append(found.gold.numpy())
                parts[right_of(name)].append((found.tokens[:, 0] == targets[rows]).numpy())
    joined = TokenPlaces(*(np.concatenate(column) for column in zip(*places, strict=True)))
    order = np.lexsort((joined.positions, joined.documents))
    judged = {name: np.concatenate(part)[order] for name, part in parts.items()}
    return TokenPlaces(*(column[order] for column in joined)), judged


def right_of(side: str) -> str:
    """Return the name under which a side's correct predictions are kept."""
    return side + _RIGHT

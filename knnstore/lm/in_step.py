"""Scoring with pointers: documents advance together, token by token, so that one search is for many."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from knnstore.datastore import Neighbors
from knnstore.lm.continuous_cache import Recent
from knnstore.lm.following import retrieve_in_step
from knnstore.lm.settings import KNNSettings
from knnstore.lm.skipping import search_some
from knnstore.store import KNNStore

if TYPE_CHECKING:
    from knnstore.lm.scoring import TokenScores

_TOKENS = 1 << 15
"""Of documents that advance together: what is known of each is in memory at once."""


def few_tokens(texts: Sequence[NDArray[np.integer[Any]]], most: int) -> list[range]:
    """Divide texts into runs that advance together, of at most so many texts."""
    runs, tokens = [range(0)], 0
    for at, text in enumerate(texts):
        if tokens + len(text) > _TOKENS or len(runs[-1]) == most:
            runs, tokens = [*runs, range(at, at)], 0
        runs[-1] = range(runs[-1].start, at + 1)
        tokens += len(text)
    return [run for run in runs if len(run)]


def score_in_step(
    store: KNNStore, parts: Sequence["TokenScores"], settings: KNNSettings
) -> Iterator["TokenScores"]:
    """Retrieve for every token of some texts.

    Args:
        store: where to search and to follow pointers.
        parts: from `read_batch`, together the whole texts, in any order.
        settings: with pointers.

    Yields:
        The tokens at one position of all texts.
    """
    if not parts:
        return
    whole = together(parts)
    keys = whole.keys.numpy()

    def search(rows: NDArray[np.int64]) -> Neighbors:
        return search_some(
            store, keys[rows], whole.searched[rows], settings.k, settings.selection, settings.mixer
        )

    steps = retrieve_in_step(
        store, keys, whole.gold.numpy(), whole.documents, whole.positions, settings, search
    )
    for rows, (found, searched) in steps:
        yield whole.rows(rows).with_neighbors(found, searched & whole.searched[rows])


def together(parts: Sequence["TokenScores"]) -> "TokenScores":
    """Put tokens without neighbours one after another."""
    tensors = ("lm_log_probs", "lm_max", "lm_entropy", "distances", "tokens", "gold", "keys")
    arrays = ("searched", "ids", "documents", "positions")
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in tensors}
    joined |= {name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays}
    recents = [part.recent for part in parts if part.recent is not None]
    if recents:
        width = max(recent.tokens.shape[1] for recent in recents)
        short = [width - recent.tokens.shape[1] for recent in recents]
        joined["recent"] = Recent(
            torch.cat(
                [pad(r.distances, (n, 0), value=torch.inf) for r, n in zip(recents, short, strict=True)]
            ),
            torch.cat([pad(r.tokens, (n, 0)) for r, n in zip(recents, short, strict=True)]),
        )
    return replace(parts[0], **joined)

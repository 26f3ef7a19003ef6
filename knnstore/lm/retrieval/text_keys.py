"""The keys of the texts that a model is reading, for the continuous cache inside `forward`."""

import numpy as np
import torch
from torch import Tensor

from knnstore.datastore import Metric
from knnstore.lm.mixing import Recent
from knnstore.lm.reading import Encoder, Tokens
from knnstore.lm.retrieval.cache import look_back
from knnstore.lm.retrieval.prefix_states import PrefixStates, prefix_names, taken_apart


class TextKeys:
    """Remembers the latest keys of each text, so that a step finds those of the steps before it.

    Args:
        encoder: makes the keys of a text again where they were forgotten.
        metric: how distances are measured.
    """

    def __init__(self, encoder: Encoder, metric: Metric | str) -> None:
        self._encoder = encoder
        self._metric = metric
        self._states: PrefixStates[Tensor] = PrefixStates()

    def look_back(
        self, sequence_ids: Tensor, keys: Tensor, at: Tensor, size: int, *, goes_on: bool = True
    ) -> Recent:
        """Look back from positions of a forward pass in the text of their row.

        Args:
            sequence_ids: the texts, shape (b, past + t), see `knnstore.lm.retrieval.prefix_states`.
            keys: of the last t positions, float32, shape (b, t, d).
            at: indices into these b * t positions, int64, shape (n,), in any order; padding finds nothing.
            size: how many tokens back a position reaches at most.
            goes_on: whether further passes may follow that have these texts behind them.
        """
        new = keys.shape[1]
        texts, fresh = taken_apart(sequence_ids, new)
        pasts = [len(text) - int(row.sum()) for text, row in zip(texts, fresh, strict=True)]
        firsts = [max(0, past - size) for past in pasts]
        names = [prefix_names(text, first) for text, first in zip(texts, firsts, strict=True)]
        known = [
            self._known(text[:past], first, row[: past - first])
            for text, past, first, row in zip(texts, pasts, firsts, names, strict=True)
        ]
        rows = [
            torch.cat([*(key[None] for key in old), own[torch.from_numpy(mask).to(keys.device)]])
            for old, own, mask in zip(known, keys, fresh, strict=True)
        ]
        if goes_on:
            self._states.put(
                [name for row in names for name in row[-size:]], [key for row in rows for key in row[-size:]]
            )
        # Where each row begins among all, and where each of its new positions stands.
        starts = np.cumsum([0, *(len(row) for row in rows)])[:-1]
        places = (starts + np.subtract(pasts, firsts))[:, None] + fresh.cumsum(1) - 1
        following = [np.append(text[first + 1 :], 0) for text, first in zip(texts, firsts, strict=True)]
        asked, back = np.unique(at.cpu().numpy(), return_inverse=True)
        reading = fresh.flatten()[asked]
        found = look_back(
            torch.cat(rows),
            torch.from_numpy(np.concatenate(following)).to(keys.device),
            torch.from_numpy(places.flatten()[asked[reading]]).to(keys.device),
            torch.from_numpy(starts[asked[reading] // new]).to(keys.device),
            size,
            self._metric,
        )
        # Padding comes last: a row without anything before it.
        order = torch.from_numpy(np.where(reading, reading.cumsum() - 1, -1)[back]).to(keys.device)
        nothing = torch.full((1, found.distances.shape[1]), torch.inf, device=keys.device)
        zeros = torch.zeros_like(nothing, dtype=torch.long)
        return Recent(torch.cat([found.distances, nothing]), torch.cat([found.tokens, zeros])).rows(order)

    def _known(self, read: Tokens, first: int, names: list[bytes]) -> list[Tensor]:
        """The keys of what was read of a text, from a position on; `names` are the names of these."""
        keys = [key for key in self._states.get(names) if key is not None]
        if len(keys) < len(names):
            return list(self._encoder.keys(read[None], np.arange(first, len(read))))
        return keys

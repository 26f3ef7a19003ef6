"""Pointers in place of searches: RetoMaton (Alon et al. 2022), measured on a text that was scored once.

Each record has a pointer to its successor, the next record of the same document. If a record was retrieved
for the last token and has this token, its successor is likely to be near the next query. So the pointers of
such records are followed. If there are enough pointers, the records that they lead to are used in place of a
search.

`follow_pointers` scores a text in this way. `Clusters` groups near records, so that a pointer leads to all
records near its target.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Keys, Metric, Neighbors, find_nearest_rows, paired_distances
from knnstore.errors import ConfigError
from knnstore.lm.calibration import ScoredText
from knnstore_research.stored_records import StoredRecords

_SAMPLED = 64
"""Number of sampled keys for each center of a cluster; a center becomes the mean of its keys."""
_MOST_CENTERS = 4096
"""Largest number of clusters, c. Assigning n records to clusters takes 2 · n · c · dim operations, so larger
stores get larger clusters, not more."""
_ROUNDS = 2
_MOST_MEMBERS = 1 << 14
"""Largest number of records with which a query is compared in whole clusters; at least one cluster is
compared."""

Rows = NDArray[np.int64]
_NO_ROWS = np.empty(0, np.int64)


class Clusters:
    """Clusters of all records by their nearest center; k-means (Lloyd 1982) finds the centers in a sample.

    Args:
        records: records of the store.
        size: mean number of records of a cluster, >= 1.
    """

    def __init__(self, records: StoredRecords, size: int) -> None:
        # 1) Find the centers.
        count = min(_MOST_CENTERS, max(1, round(len(records) / size)))
        sample = records.keys[:: max(1, len(records) // (_SAMPLED * count))]
        centers = sample[:: max(1, len(sample) // count)][:count].copy()
        for _ in range(_ROUNDS):
            labels = _find_nearest_centers(sample, centers)
            order = np.argsort(labels, kind="stable")
            present, starts = np.unique(labels[order], return_index=True)
            sums = np.add.reduceat(sample[order], starts, dtype=np.float64)
            centers[present] = sums / np.diff(starts, append=len(sample))[:, None]
        # 2) Assign every record to its nearest center.
        self._labels = _find_nearest_centers(records.keys, centers)
        order = np.argsort(self._labels, kind="stable")
        self._members = np.split(order, np.cumsum(np.bincount(self._labels, minlength=count))[:-1])

    def around(self, rows: Rows) -> Rows:
        """Return the row numbers of all records that share a cluster with a record of `rows`.

        The clusters are in the order of `rows`. Whole clusters are left out so that at most `_MOST_MEMBERS`
        rows are returned, but the first cluster is always returned. No rows give no rows.
        """
        labels, first = np.unique(self._labels[rows], return_index=True)
        clusters = [self._members[label] for label in labels[np.argsort(first)]]
        total = np.cumsum([len(members) for members in clusters])
        fit = max(1, int(np.searchsorted(total, _MOST_MEMBERS, side="right")))
        return np.concatenate([_NO_ROWS, *clusters[:fit]])


class Followed(NamedTuple):
    """The result of `follow_pointers` for n tokens: their probabilities, and which tokens needed a search."""

    knn_probs: Tensor
    """Probability of each token by the retrieved records (p_kNN), float32, shape (n,); NaN if nothing was
    retrieved."""
    is_searched: Tensor
    """True for tokens for which a search was made, bool, shape (n,)."""

    @property
    def saved(self) -> float:
        """The fraction of tokens that needed no search, because pointers replaced it."""
        return 1 - float(self.is_searched.double().mean())

    def log_probs(self, lm_log_probs: Tensor, lam: float) -> Tensor:
        """Mix the retrieved probabilities with the model's, and return log p of each token, shape (n,).

        A token for which nothing was retrieved keeps the model's log-probability.

        Args:
            lm_log_probs: log p of each token by the model alone, shape (n,).
            lam: weight λ of the retrieved probabilities.
        """
        lm_probs = lm_log_probs.exp()
        mixed = (1 - lam) * lm_probs + lam * self.knn_probs
        return torch.where(self.knn_probs.isnan(), lm_log_probs, mixed.log())


def follow_pointers(
    records: StoredRecords,
    text: ScoredText,
    found: Neighbors,
    temperature: float,
    *,
    min_pointers: int | None = 1,
    max_pointers: int = 1024,
    clusters: Clusters | None = None,
) -> Followed:
    """Compute the probability of each token of a text from retrieved records, with few searches.

    A pointer leads from a record to the next record of the same document. If a record was retrieved for the
    last token and has this token, its pointer is followed. If there are enough pointers, the records that
    they lead to are used in place of a search.

    Args:
        records: records of the store, with the selection that was searched.
        text: documents that were scored once.
        found: the k nearest records of each of the n tokens, from `KNNStore.search` with
            ``text.evidence.keys``. They are used only for tokens that need a search, together with the
            targets of pointers.
        temperature: T of the softmax over distances.
        min_pointers: least number of pointers that replace a search; None searches for every token, and adds
            the targets of pointers.
        max_pointers: largest number of pointers that are followed, from the nearest records.
        clusters: if a search is replaced, the k nearest records in the clusters of the pointers' targets are
            used. None uses only the targets.

    Raises:
        ConfigError: `text` was scored without keys or targets.
    """
    if text.evidence.keys is None or text.targets is None:
        raise ConfigError("pointers need a text with keys and targets: score it with score_once")
    keys, targets, documents = text.evidence.keys.numpy(), text.targets.numpy(), text.documents.numpy()
    knn_probs, is_searched = np.full(len(text), np.nan, np.float32), np.zeros(len(text), bool)
    document, token, retrieved = -1, -1, _NO_ROWS
    for at in np.argsort(documents, kind="stable"):
        if documents[at] != document:
            document, retrieved = documents[at], _NO_ROWS
        # 1) Follow the pointers of the nearest records that predicted the last token.
        leading = retrieved[records.tokens[retrieved] == token][:max_pointers]
        rows = records.successors[leading]
        rows = rows[rows >= 0]
        # 2) Search if there are too few.
        is_searched[at] = min_pointers is None or len(rows) < min_pointers
        most = None
        if is_searched[at]:
            rows = np.union1d(rows, records.rows_of(found.ids[at, found.ids[at] >= 0]))
        elif clusters is not None:
            rows, most = clusters.around(rows), found.ids.shape[1]
        # 3) Sort what was retrieved, and compute p_kNN.
        rows = np.sort(rows)  # of equally near records the one with the least id comes first
        distances = paired_distances(keys[at], records.keys[rows], records.metric)
        order = np.argsort(distances, kind="stable")[:most]
        retrieved, token = rows[order], targets[at]
        if len(retrieved):
            nearness = distances[order[0]] - distances[order]
            weights = np.exp(nearness / temperature)
            knn_probs[at] = weights[records.tokens[retrieved] == token].sum() / weights.sum()
    return Followed(torch.from_numpy(knn_probs), torch.from_numpy(is_searched))


def _find_nearest_centers(keys: Keys, centers: Keys) -> Rows:
    """Return the index of the nearest center of each key, int64, shape (n,)."""
    return find_nearest_rows(keys, centers, 1, Metric.L2).ids[:, 0]

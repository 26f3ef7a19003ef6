"""Mixing the predictions of the store into the logits of rows; called at each decoding step.

A row is one position of one text. Each row may have its own settings, for example other domains; rows with
the same settings are retrieved together. This module does not depend on the program that runs the model.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.batch import Batch
from knnstore.lm.components import Form
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import Likelihoods, ModelDistribution
from knnstore.lm.mixture import build_mixture, look_up
from knnstore.lm.settings import KNNSettings
from knnstore.store import Reader

_CHUNK_VALUES = 1 << 25
"""Number of log-probabilities that are mixed at once: 128 MiB of float32."""

Indices = NDArray[np.int64]


class Rows(NamedTuple):
    """n positions to predict, each with the model's logits and the query vector for the store."""

    logits: Tensor
    """Logits of the model, shape (n, v), any floating dtype."""
    keys: Tensor
    """Query vector of each position, shape (n, d), on any device."""
    contexts: Contexts | None
    """The texts before the positions; None if they are not known."""
    is_text: NDArray[np.bool_] | None = None
    """False at padding, shape (n,); None means no padding."""

    def select(self, rows: Indices | slice) -> Self:
        """Return the positions in `rows`, which is a slice or an array of indices."""
        at = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        return self._replace(
            logits=self.logits[at],
            keys=self.keys[at],
            contexts=None if self.contexts is None else self.contexts.select_rows(rows),
            is_text=None if self.is_text is None else self.is_text[rows],
        )


class RowMixer:
    """Mixes predictions that are retrieved from a store into the model's logits.

    Args:
        store: the store to retrieve from.
    """

    def __init__(self, store: Reader) -> None:
        self._store = store

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mix(self, rows: Rows, each: Sequence[KNNSettings]) -> Tensor:
        """Mix predictions from the store into the logits of n rows; a row is one position of one text.

        Args:
            rows: the n rows.
            each: one settings object for all rows, or n settings objects, one for each row. Rows with the
                same object form a group and are retrieved together.

        Returns:
            Log-probabilities of the mixture, float32, shape (n, v). A group keeps the model's logits if its
            settings use the model alone; on a CPU, also if no component found anything for its rows. If such
            a group has all rows, the tensor ``rows.logits`` itself is returned.

        Raises:
            ConfigError: `each` has neither one nor n settings; or the settings need the texts, and the texts
                are not known.
        """
        count = len(rows.logits)
        if len(each) not in (1, count):
            raise ConfigError(
                f"{len(each)} settings were given for {count} rows: give one, or one for each row"
            )
        groups: dict[int, list[int]] = {}
        for row, settings in enumerate(each):
            groups.setdefault(id(settings), []).append(row)
        if len(groups) == 1:
            return self._mix_alike(rows, each[0])
        mixed = rows.logits.to(torch.float32, copy=True)
        for members in groups.values():
            at = np.array(members, np.int64)
            mixed[torch.from_numpy(at)] = self._mix_alike(rows.select(at), each[members[0]]).float()
        return mixed

    def score_targets(self, rows: Rows, targets: Tensor, settings: KNNSettings, count: int) -> Likelihoods:
        """Compute the mixture's log-probabilities of the target tokens and of the most probable tokens.

        Args:
            rows: the n rows.
            targets: the target tokens, int64, shape (n,).
            settings: the settings of all rows.
            count: number of most probable tokens to return; at most the size of the vocabulary is returned.

        Raises:
            ConfigError: the settings need the texts of the rows, and the texts are not known.
        """
        count = min(count, rows.logits.shape[1])
        lm = ModelDistribution(rows.logits)
        if settings.is_model_alone:
            return Likelihoods.from_log_probs(lm.log_probs, targets, count)
        batch = _build_batch(rows, lm, settings, targets)
        mixture = build_mixture(settings, look_up(self._store, settings, batch, Form.DISTRIBUTION))
        return mixture.score_targets(lm.log_probs, targets, count)

    def _mix_alike(self, rows: Rows, settings: KNNSettings) -> Tensor:
        """Mix predictions from the store into the logits of rows that all have the same settings.

        The rows are processed in chunks, to bound memory.

        Args:
            rows: the n rows; a row is one position of one text.
            settings: the settings of all rows.

        Returns:
            Log-probabilities of the mixture, float32, shape (n, v); the unchanged logits if no component
            found anything for any row, or if the settings use the model alone.

        Raises:
            ConfigError: the settings need the texts of the rows, and the texts are not known.
        """
        if settings.is_model_alone:
            return rows.logits
        is_anything_found = False
        parts, step = [], max(1, _CHUNK_VALUES // rows.logits.shape[1])
        for start in range(0, len(rows.logits), step):
            at = slice(start, start + step)
            some = rows if start == 0 and step >= len(rows.logits) else rows.select(at)
            lm = ModelDistribution(some.logits)
            batch = _build_batch(some, lm, settings)
            mixture = build_mixture(settings, look_up(self._store, settings, batch, Form.DISTRIBUTION))
            # To ask a GPU would mean to wait for it; its rows without a result have the model's log p.
            is_anything_found = (
                is_anything_found or some.logits.device.type != "cpu" or mixture.is_anything_found
            )
            parts.append(mixture.compute_log_probs(lm))
        if not is_anything_found:
            return rows.logits
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _build_batch(
    rows: Rows, lm: ModelDistribution, settings: KNNSettings, targets: Tensor | None = None
) -> Batch:
    """Create the input of `look_up`, a `Batch`, from rows with the same settings.

    Args:
        rows: the n rows; a row is one position of one text.
        lm: the model's distributions at the rows.
        settings: the settings of all rows.
        targets: the target tokens, int64, shape (n,); None when text is generated.

    Raises:
        ConfigError: the settings need the texts of the rows, and the texts are not known.
    """
    if settings.needs_text and rows.contexts is None:
        raise ConfigError(
            "a continuous cache and n-grams need token ids: give input_ids, or settings without them"
        )
    return Batch(
        rows.keys.to(rows.logits.device).float(),
        lm.log_max,
        None if settings.needs_nearest_only else lm.compute_entropy(),
        rows.logits.shape[1],
        contexts=rows.contexts if settings.needs_text else None,
        targets=targets,
        is_text=None if rows.is_text is None else torch.from_numpy(rows.is_text),
    )

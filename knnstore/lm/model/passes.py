"""What one forward pass asks retrieval for, and what passes remember of the texts that they read."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.keys import keep_positions
from knnstore.lm.mixing import Recent
from knnstore.lm.reading import Encoder
from knnstore.lm.retrieval import (
    PointerStates,
    TextKeys,
    TextPass,
    TextStates,
    WrittenNGrams,
    sequence_ids_of,
)
from knnstore.lm.settings import KNNSettings
from knnstore.store import Reader


class Texts(NamedTuple):
    """The texts of a forward pass, as `forward` was given them."""

    input_ids: Tensor | None
    attention_mask: Tensor | None
    sequence_ids: Tensor | None
    """The whole texts where they are known."""
    prefix: int | None
    """The token that comes before every document; None where none does."""
    pointer_states: PointerStates | None
    goes_on: bool
    """Whether further passes may follow that have these texts behind them."""


@dataclass
class Positions:
    """The positions of a forward pass that are predicted from, in any shape."""

    keys: Tensor
    """Shape (..., d)."""
    attended: Tensor
    """Whether a position is part of a text and not padding: bool, shape (...)."""
    all_keys: Tensor
    """Of every position of the pass, shape (b, t, d)."""
    kept: Tensor
    """Which of the b * t these are, int64, shape (...)."""
    mask: Tensor | None
    """0 for padding, shape (b, t); None where there is none."""
    recent: Recent | None = None
    """What each finds in its own text; None without a cache."""
    ngrams: WrittenNGrams | None = None
    """What n-grams are before each; None where none count."""
    text_pass: TextPass | None = None
    """What pointers go by; None without them."""

    @classmethod
    def of(cls, keys: Tensor, attention_mask: Tensor | None, logits_to_keep: int | Tensor) -> Self:
        """Choose from the keys of a pass, shape (b, t, d); the other arguments are those of `forward`."""
        batch, length = keys.shape[:2]
        at = torch.arange(batch * length, device=keys.device).reshape(batch, length, 1)
        kept = keep_positions(at, logits_to_keep)[..., 0]
        mask, attended = None, torch.ones_like(kept, dtype=torch.bool)
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            mask = attention_mask[:, -length:].to(keys.device)
            attended = mask.flatten()[kept] != 0
        return cls(keys.flatten(0, 1)[kept], attended, keys, kept, mask)


class TextMemory:
    """Remembers of the texts that a model reads what their next tokens are predicted with.

    Args:
        encoder: makes the keys.
        store: what is retrieved from.
    """

    def __init__(self, encoder: Encoder, store: Reader) -> None:
        self._store = store
        self._keys = TextKeys(encoder, store.identity.metric)
        self._states = TextStates(encoder)

    def positions(
        self, states: Tensor, texts: Texts, logits_to_keep: int | Tensor, settings: KNNSettings
    ) -> Positions:
        """Find what the positions of a pass are mixed by, and remember what later ones need.

        Args:
            states: of the pass at the place of the keys, shape (b, t, d).
            texts: that it reads.
            logits_to_keep: as of `forward`.
            settings: in force.

        Raises:
            ConfigError: the texts are not known, and something in the settings goes by them.
        """
        whole, (batch, length) = texts.sequence_ids, states.shape[:2]
        keys = self._states.keys(states, texts.attention_mask, whole, goes_on=texts.goes_on)
        found = Positions.of(keys, texts.attention_mask, logits_to_keep)
        kept = found.kept.flatten()
        if settings.needs_text and whole is None:
            raise ConfigError(
                "a continuous cache and n-grams need token ids: give input_ids, or settings without them"
            )
        if settings.cache is not None and whole is not None:
            size = settings.cache.size
            found.recent = self._keys.look_back(whole, keys, kept, size, goes_on=texts.goes_on)
        if settings.ngrams is not None and whole is not None:
            found.ngrams = WrittenNGrams.of(self._store, settings, whole, length, kept, texts.prefix)
        if settings.pointers is not None:
            read, point = whole, texts.pointer_states
            if read is None:  # no pass before this one is known: pointers begin here
                point = None
                read = None if texts.input_ids is None else sequence_ids_of(texts.input_ids, found.mask)
            found.text_pass = TextPass.of(read, batch, length, found.kept.cpu(), point)
        return found

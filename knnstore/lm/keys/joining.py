"""Keys that join the hidden state of a token with the hidden states of the previous tokens.

    key_t = h_t + a_1 P h_(t-1) + a_2 P P h_(t-2) + ...

h_t is the hidden state of token t at one place in the model. P rotates a vector by one component, and the
discounts a_i weight the earlier states. The sum is as wide as one state, and no parameter is fitted. States
that were rotated by different amounts are close to orthogonal, so the squared distance of two sums is close
to the weighted sum of the squared distances of their states (Sahlgren, Holst & Kanerva 2008: permutations
encode the order of words). Positions before a text's first token count as zero vectors.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from knnstore.errors import ConfigError

_FIRST, _FURTHER = 0.5, 0.7  # 0.5 and 0.35 were the best first two discounts in tests


@dataclass(frozen=True, slots=True)
class Joining:
    """How many hidden states a key joins, and the discount of each earlier state.

    A store's identity has ``str(joining)`` after the name of the place, e.g.
    ``transformer.h.3.mlp:input +0.5 +0.35``. It is empty if a key is a single state.
    """

    discounts: tuple[float, ...] = ()
    """Discount of the previous token's state, then of the token before it, and so on; empty for one state."""

    @classmethod
    def of(cls, states: int, discounts: Sequence[float] | None = None) -> Self:
        """Create a joining of a number of states.

        Args:
            states: number of states in a key, the token's own state included, >= 1.
            discounts: one for each earlier state, > 0 and finite; default 0.5, 0.35 and so on, each 0.7
                times the discount before it.

        Raises:
            ConfigError: `states` or a discount is out of range, or the number of discounts is not
                ``states - 1``.
        """
        if states < 1:
            raise ConfigError(f"a key is made of at least 1 state, got {states}")
        if discounts is None:
            discounts = [round(_FIRST * _FURTHER**back, 4) for back in range(states - 1)]
        if len(discounts) != states - 1:
            raise ConfigError(
                f"one discount is needed for each state before the last: {states - 1}, got {len(discounts)}"
            )
        if not all(0 < discount < float("inf") for discount in discounts):
            raise ConfigError(f"discounts must be numbers above 0, got {', '.join(map(str, discounts))}")
        return cls(tuple(map(float, discounts)))

    @classmethod
    def parse(cls, key: str) -> tuple[str, Self]:
        """Split a store's key name into the name of the place and the joining.

        Raises:
            ConfigError: the part after the place is not a list of discounts like ``+0.5 +0.35``.
        """
        place, *joined = key.split(" ")
        if all(part.startswith("+") for part in joined):
            with suppress(ValueError):
                return place, cls.of(1 + len(joined), [float(part) for part in joined])
        raise ConfigError(f"{key!r} is no key that this version of knnstore knows: use the one that made it")

    def __str__(self) -> str:
        return "".join(f" +{discount}" for discount in self.discounts)

    @property
    def states(self) -> int:
        """Number of states in a key, the token's own state included, >= 1."""
        return 1 + len(self.discounts)

    def __call__(self, states: Tensor, attended: Tensor | None = None) -> Tensor:
        """Compute the keys of whole texts from their states.

        Args:
            states: shape (b, t, d).
            attended: bool, shape (b, t), False at padding, which may be anywhere; None means no padding.

        Returns:
            Shape (b, t, d), float32; the unchanged `states` if a key is a single state. Undefined at padding.
        """
        if not self.discounts:
            return states
        if attended is None:
            return self.after(pad(states, (0, 0, len(self.discounts), 0)))
        states = states.float()
        read = attended.cumsum(1) - 1  # number of tokens of the text before each position
        columns = (~attended).to(torch.uint8).argsort(dim=1, stable=True)  # their columns, in order
        keys = states
        for back, discount in enumerate(self.discounts, 1):
            at = columns.take_along_dim((read - back).clamp(min=0), 1)
            earlier = states.take_along_dim(at[..., None], 1).masked_fill((read < back)[..., None], 0)
            keys = keys.add(earlier.roll(back, -1), alpha=discount)
        return keys

    def after(self, states: Tensor) -> Tensor:
        """Compute the keys of the last t positions of texts without padding.

        Args:
            states: shape (b, len(discounts) + t, d): the states of the previous tokens, then of the t
                positions; zeros before the beginning of a text.

        Returns:
            float32, shape (b, t, d).
        """
        states, count = states.float(), len(self.discounts)
        length = states.shape[1] - count
        keys = states[:, count:]
        for back, discount in enumerate(self.discounts, 1):
            earlier = states[:, count - back :][:, :length]
            keys = keys.add(earlier.roll(back, -1), alpha=discount)
        return keys

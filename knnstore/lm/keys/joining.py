"""Keys that remember: the state of a token joined with those of the tokens before it.

    key_t = h_t + a_1 P h_(t-1) + a_2 P P h_(t-2) + ...

A sum is no wider than one state and needs nothing that is fitted. P moves every component on by one: states
whose components were moved differently are close to orthogonal, so that the distance of two sums is close to
the sum of the distances (Sahlgren, Holst & Kanerva 2008: permutations encode the order of words). The states
are of one place in the model, hence of one spread; the discounts a_i say how much less what came before
counts. Before a text's first token there are no states: zeros stand for them.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from knnstore.errors import ConfigError

_FIRST, _FURTHER = 0.5, 0.7  # of the states tried, .5 and .35 were the best first two discounts


@dataclass(frozen=True, slots=True)
class Joining:
    """Which states make a key: that of its token, and those before it at a discount.

    ``str(joining)`` stands behind the canonical name of the place in a store's identity, e.g.
    ``transformer.h.3.mlp:input +0.5 +0.35``, and is empty where a key is one state.
    """

    discounts: tuple[float, ...] = ()
    """Of the state before, of the one before that, and so on."""

    @classmethod
    def of(cls, states: int, discounts: Sequence[float] | None = None) -> Self:
        """Join so many states.

        Args:
            states: >= 1.
            discounts: of all states but the first, > 0; default 0.5, 0.35 and so on, each 0.7 of the last.

        Raises:
            ConfigError: one is out of range, or they do not fit together.
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
        """Divide a key's name, as in a store's identity, into that of its place and the joining.

        Raises:
            ConfigError: it is not such a name.
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
        """How many there are in a key."""
        return 1 + len(self.discounts)

    def __call__(self, states: Tensor, attended: Tensor | None = None) -> Tensor:
        """Make keys of the states of some texts, each from its beginning.

        Args:
            states: shape (b, t, d).
            attended: False at padding, wherever that is, bool, shape (b, t); None is all True.

        Returns:
            Shape (b, t, d); float32, but where a key is one state as they are. Not to be read at padding.
        """
        if not self.discounts:
            return states
        if attended is None:
            return self.after(pad(states, (0, 0, len(self.discounts), 0)))
        states = states.float()
        read = attended.cumsum(1) - 1  # how many tokens of the text are before each
        columns = (~attended).to(torch.uint8).argsort(dim=1, stable=True)  # where these are, in order
        keys = states
        for back, discount in enumerate(self.discounts, 1):
            at = columns.take_along_dim((read - back).clamp(min=0), 1)
            earlier = states.take_along_dim(at[..., None], 1).masked_fill((read < back)[..., None], 0)
            keys = keys.add(earlier.roll(back, -1), alpha=discount)
        return keys

    def after(self, states: Tensor) -> Tensor:
        """Make keys of the states of some texts without padding, but for the first, which are before them.

        Args:
            states: shape (b, discounts + t, d); zeros where a text has not begun.

        Returns:
            As of a call, shape (b, t, d).
        """
        states, count = states.float(), len(self.discounts)
        length = states.shape[1] - count
        keys = states[:, count:]
        for back, discount in enumerate(self.discounts, 1):
            earlier = states[:, count - back :][:, :length]
            keys = keys.add(earlier.roll(back, -1), alpha=discount)
        return keys

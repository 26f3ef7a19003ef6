"""The values of an explanation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from knnstore.lm.explanation.rendering import Shown, html_of

THIS_TEXT = "(this text)"
"""Stands for a document where a token was found in the explained text itself."""

_NOT_OF_STORE = ("model", "cache", "own n-grams")


@dataclass(frozen=True, slots=True)
class Source:
    """One retrieved record."""

    token: int
    """The token that it predicts."""
    text: str
    share: float
    """Its part of p_kNN, between 0 and 1."""
    distance: float | None
    """Squared for l2, the negated inner product for ip; None where an n-gram was found, by its tokens."""
    document: str
    domain: str
    """`THIS_TEXT` and empty where the explained text itself is the source."""
    position: int
    """Index of the token in the document."""
    context: str
    """The text before the token there."""
    continuation: str
    """The text after the token there."""
    matched: int = 0
    """Number of tokens of the context that precede it there; the beginning of a document counts as one."""
    part: str = "keys"
    """The part of the mixture that found it: ``keys``, ``n-grams``, ``cache`` or ``own n-grams``."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a token's probability that one component gives."""

    name: str
    """``model``, ``keys``, ``n-grams``, ``cache``, ``own n-grams`` or the name of another package's
    component."""
    weight: float
    """Its weight in the mixture, between 0 and 1; those of all parts add up to 1."""
    p: float
    """The token's probability in it. The token's p is the sum of weight × p over the parts."""


@dataclass(frozen=True, slots=True)
class TokenExplanation:
    """One token of a text, and where its probability comes from."""

    position: int
    token: int
    text: str
    """The text that the token adds; a character in several tokens belongs to the last one."""
    p_lm: float
    p_knn: float
    lam: float
    """λ in force for this token; 0 when nothing was retrieved."""
    p: float
    """The mixture."""
    neighbors: tuple[Source, ...]
    """The nearest records, nearest first; with a continuous cache or n-grams those of the largest shares. Of
    n-grams there are places of the token itself alone."""
    parts: tuple[Part, ...] = ()
    """Model first, then what is mixed in."""
    causes: tuple[Source, ...] = ()
    """The places of this token, wherever they were found, that give most to it, the largest share first."""

    @property
    def shares(self) -> dict[str, float]:
        """The weight of each part in the mixture, by name; they sum to 1."""
        return {part.name: part.weight for part in self.parts}

    @property
    def store_share(self) -> float:
        """The share of p that is from the store, between 0 and 1: what neither model nor cache gives."""
        given = sum(part.weight * part.p for part in self.parts if part.name not in _NOT_OF_STORE)
        return min(given / self.p, 1.0) if self.p > 0 else 0.0


@dataclass(frozen=True, slots=True)
class DocumentEffect:
    """The effect of one document on the tokens of a text.

    A token's p without the document is what the same arithmetic gives when its records are taken out of
    those that were retrieved: the others share its part of p_kNN, λ and T stay as they were chosen; where
    nothing is left, the model has the weight. What its n-grams gave is taken away, nothing is counted anew.
    A search without the document would find others in its place: `Selection.without` makes one.
    """

    document: str
    domain: str
    positions: tuple[int, ...]
    """The tokens whose p changes by more than 1 %, ascending."""
    p_without: tuple[float, ...]
    """Their p without the document."""
    gain: float
    """The sum of log p - log p_without over these tokens, in nats; negative where the document did harm."""


@dataclass(frozen=True, slots=True)
class Explanation(Sequence[TokenExplanation]):
    """The explained tokens of a text, and the effect of each document on them."""

    tokens: tuple[TokenExplanation, ...]
    documents: tuple[DocumentEffect, ...] = ()
    """Documents with any effect, the most helpful first."""

    @overload
    def __getitem__(self, at: int) -> TokenExplanation: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[TokenExplanation, ...]: ...
    def __getitem__(self, at: int | slice) -> TokenExplanation | tuple[TokenExplanation, ...]:
        return self.tokens[at]

    def __len__(self) -> int:
        return len(self.tokens)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: each token is colored by the store's share of its probability."""
        tokens = [Shown(one.text, one.store_share, one.p, one.p_lm, _best_of(one)) for one in self.tokens]
        return html_of(
            tokens, [(one.domain, one.document, len(one.positions), one.gain) for one in self.documents]
        )


def _best_of(token: TokenExplanation) -> str:
    """Return the document that gives most to a token; empty if none does."""
    if not token.causes:
        return ""
    best = token.causes[0]
    return f"{best.domain}/{best.document}" if best.domain else best.document

"""The result of `explain`: explained tokens, their sources, effects of documents, and HTML for notebooks."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import overload

THIS_TEXT = "(this text)"
"""Name of the document in a `Source` that is in the explained text itself."""

_NOT_OF_STORE = ("model", "cache", "own n-grams")
"""Names of the parts of a mixture that use nothing from the store."""


@dataclass(frozen=True, slots=True)
class Source:
    """A place that a prediction comes from: a retrieved record, or an earlier place of the explained text."""

    token: int
    """The token at the place, which the place predicts."""
    text: str
    """Text of this token."""
    share: float
    """Weight of the place among all retrieved places of all components, between 0 and 1. With keys alone: its
    weight in p_kNN."""
    distance: float | None
    """Squared Euclidean distance for the metric l2, negated inner product for ip; None for a place that was
    found by its tokens, as n-grams are."""
    document: str
    """Id of the document; `THIS_TEXT` for a place of the explained text."""
    domain: str
    """Domain of the document; empty for a place of the explained text."""
    position: int
    """Index of the token in the document."""
    context: str
    """The text before the token in the document."""
    continuation: str
    """The text after the token in the document."""
    matched: int = 0
    """Number of tokens before the place that equal the tokens before the explained token. The beginning of a
    document counts as one matched token."""
    part: str = "keys"
    """The component that found the record: ``keys``, ``n-grams``, ``cache``, ``own n-grams`` or the name of
    another package's component."""
    source_text: str | None = None
    """The source of the document, e.g. the sentence that the document translates; None if the document is not
    a pair, and for a place of the explained text."""


@dataclass(frozen=True, slots=True)
class Part:
    """The contribution of one component to the probability of a token."""

    name: str
    """``model``, ``keys``, ``n-grams``, ``cache``, ``own n-grams`` or the name of another package's
    component."""
    weight: float
    """Weight of the component in the mixture, between 0 and 1; the weights of all parts sum to 1."""
    p: float
    """Probability of the token in the component. The token's p is the sum of weight × p over the parts."""


@dataclass(frozen=True, slots=True)
class TokenExplanation:
    """One token of a text, and where its probability comes from."""

    position: int
    """Index of the token in the text."""
    token: int
    """The token's id."""
    text: str
    """The text that the token adds. If a character has several tokens, the last one has the character."""
    p_lm: float
    """Probability of the token by the model alone."""
    p_knn: float
    """Probability of the token by all components together, without the model; 0 if nothing was retrieved.
    With keys alone this is the probability by the retrieved records."""
    lam: float
    """Weight λ of all components together for this token; 0 if nothing was retrieved."""
    p: float
    """Probability of the token in the mixture."""
    neighbors: tuple[Source, ...]
    """The nearest records, nearest first; they may predict any token. With a continuous cache, n-grams or
    other components: the sources with the largest shares. N-grams list only places that predict this
    token."""
    parts: tuple[Part, ...] = ()
    """Contribution of each component, the model first."""
    causes: tuple[Source, ...] = ()
    """The sources that predict this token, of all components, the largest share first."""

    @property
    def shares(self) -> dict[str, float]:
        """The weight of each part in the mixture, by name; the weights sum to 1."""
        return {part.name: part.weight for part in self.parts}

    @property
    def store_share(self) -> float:
        """The fraction of p that comes from the store, between 0 and 1; 0 if p is 0.

        The contributions of the model, the continuous cache and the text's own n-grams are not from the
        store.
        """
        from_store = sum(part.weight * part.p for part in self.parts if part.name not in _NOT_OF_STORE)
        return min(from_store / self.p, 1.0) if self.p > 0 else 0.0


@dataclass(frozen=True, slots=True)
class DocumentEffect:
    """The effect of one document on the tokens of a text.

    The probability without the document is estimated from the records that were retrieved, without another
    search: the records of the document are removed, and the weights of the other records are normalized
    again, with the same λ and T. If no record is left, the model's probability is used. The contributions of
    n-grams in the document are subtracted, and n-grams are not counted again. A real search without the
    document (`Selection.without_content`) would find other records in place of the removed records.
    """

    document: str
    """Id of the document."""
    domain: str
    """Name of the document's domain."""
    positions: tuple[int, ...]
    """Positions of the tokens whose p changes by more than 1 %, ascending."""
    p_without: tuple[float, ...]
    """Probability of each of these tokens without the document."""
    gain: float
    """The sum of log p - log p_without over these tokens, in nats; negative if the document did harm."""


@dataclass(frozen=True, slots=True)
class Explanation(Sequence[TokenExplanation]):
    """The explained tokens of a text, and the effect of each document on them; a sequence of the tokens."""

    tokens: tuple[TokenExplanation, ...]
    """The explained tokens, by position."""
    documents: tuple[DocumentEffect, ...] = ()
    """Effects of the documents that changed a token, the largest gain first."""

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
        return _render_html(self)


# -- HTML for notebooks; it has no scripts, and all text is escaped

STORE_COLOR = "20 140 130"
"""Red, green and blue of the part that comes from the store; the server's page has the same color."""
MAX_OPACITY = 0.6
"""Opacity of the color if the whole probability of a token comes from the store."""

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode categories that change how text is shown, or show nothing
_HARMLESS = "\n\t\u200c\u200d"  # the last two join letters, and the people of an emoji
_MAX_DOCUMENTS = 8


def _render_html(explanation: Explanation) -> str:
    """Return an explanation as HTML: perplexities, the colored tokens, and the documents that helped most.

    At most `_MAX_DOCUMENTS` documents are listed. An explanation without tokens gives a message.
    """
    if not explanation.tokens:
        return "<div>(no tokens)</div>"
    alone = _compute_perplexity([token.p_lm for token in explanation.tokens])
    mixed = _compute_perplexity([token.p for token in explanation.tokens])
    shades = "".join(_render_shade(share, "&emsp;") for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    helpful = [effect for effect in explanation.documents if effect.gain > 0][:_MAX_DOCUMENTS]
    rows = "".join(
        f'<tr><td style="text-align:left"><bdi>{_escape_text(_join_name(effect.domain, effect.document))}'
        f"</bdi></td><td>{len(effect.positions):,}</td><td>{effect.gain:.2f}</td></tr>"
        for effect in helpful
    )
    table = (
        '<table><tr><th style="text-align:left">documents that helped</th><th>tokens</th><th>nats</th></tr>'
        f"{rows}</table>"
    )
    return (
        '<div style="max-width:56em">'
        f'<div style="opacity:.7;font-size:85%">{len(explanation.tokens):,} tokens · perplexity {alone:,.1f} '
        f"by the model alone, {mixed:,.1f} with the store · share of the store {shades}</div>"
        '<div dir="auto" style="white-space:pre-wrap;line-height:1.9">'
        f"{''.join(map(_render_token, explanation.tokens))}</div>"
        f"{table if helpful else ''}</div>"
    )


def _render_token(token: TokenExplanation) -> str:
    """Return a token as a colored HTML span with a tooltip.

    The tooltip shows the token's probabilities, and the document of its first cause (the source with the
    largest share among the sources that predict the token).
    """
    tooltip = f"p {token.p:.3g} · model alone {token.p_lm:.3g} · {token.store_share:.0%} from the store"
    if token.causes:
        tooltip += f" · {_join_name(token.causes[0].domain, token.causes[0].document)}"
    text = _escape_text(token.text).replace("\n", "↵\n") or "·"
    return _render_shade(token.store_share, text, _escape_text(tooltip))


def _render_shade(share: float, inner_html: str, tooltip: str = "") -> str:
    """Return an HTML span in the store's color, whose opacity shows a share.

    Args:
        share: between 0 (transparent) and 1.
        inner_html: content of the span; must be escaped.
        tooltip: text that is shown under the mouse; must be escaped. Empty for no tooltip.
    """
    title = f' title="{tooltip}"' if tooltip else ""
    return (
        f'<span{title} style="background:rgb({STORE_COLOR} / {share * MAX_OPACITY:.2f})">{inner_html}</span>'
    )


def _join_name(domain: str, document: str) -> str:
    """Return ``domain/document``, or the document's id if the domain is empty."""
    return f"{domain}/{document}" if domain else document


def _escape_text(text: str) -> str:
    """Escape text for HTML, and replace hidden characters by visible ones."""
    return escape("".join(map(_make_visible, text)))


def _make_visible(char: str) -> str:
    """Return a visible symbol for a character that shows nothing or changes how text is shown.

    All other characters, and the characters in `_HARMLESS`, are returned unchanged.
    """
    if char in _HARMLESS or unicodedata.category(char) not in _HIDDEN:
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"‹U+{ord(char):04X}›"


def _compute_perplexity(probs: Sequence[float]) -> float:
    """Return the perplexity of tokens with these probabilities.

    Args:
        probs: at least one probability; 0 counts as 1e-30.
    """
    return math.exp(-sum(math.log(max(p, 1e-30)) for p in probs) / len(probs))

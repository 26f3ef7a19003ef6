"""HTML of an explained text for notebooks; it has no scripts, and all text is escaped."""

import math
import unicodedata
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

STORE_COLOR = "20 140 130"
"""Red, green and blue of what is from the store; the server's page has the same."""
DEEPEST = 0.6
"""The opacity where all is from the store."""

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # steer the text, or show nothing
_HARMLESS = "\n\t\u200c\u200d"  # the last two join letters, and people of an emoji
_DOCUMENTS = 8


class Shown(NamedTuple):
    """The displayed values of a token."""

    text: str
    share: float
    """From the store, of its probability."""
    p: float
    p_lm: float
    source: str
    """The document that gives most, may be empty."""


def html_of(tokens: Sequence[Shown], documents: Sequence[tuple[str, str, int, float]]) -> str:
    """Return HTML in which each token is colored by the store's share of its probability.

    Args:
        tokens: displayed values of the text's tokens.
        documents: domain, id, tokens changed and nats gained; the best first.
    """
    if not tokens:
        return "<div>(no tokens)</div>"
    alone, mixed = (
        _perplexity(values) for values in zip(*((one.p_lm, one.p) for one in tokens), strict=True)
    )
    shades = "".join(_shade(share, "&emsp;") for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    helped = [one for one in documents if one[3] > 0][:_DOCUMENTS]
    rows = "".join(
        f'<tr><td style="text-align:left"><bdi>{_safe(f"{domain}/{id}" if domain else id)}</bdi></td>'
        f"<td>{count:,}</td><td>{gain:.2f}</td></tr>"
        for domain, id, count, gain in helped
    )
    table = (
        '<table><tr><th style="text-align:left">documents that helped</th><th>tokens</th><th>nats</th></tr>'
        f"{rows}</table>"
    )
    return (
        '<div style="max-width:56em">'
        f'<div style="opacity:.7;font-size:85%">{len(tokens):,} tokens · perplexity {alone:,.1f} by the '
        f"model alone, {mixed:,.1f} with the store · share of the store {shades}</div>"
        f'<div dir="auto" style="white-space:pre-wrap;line-height:1.9">{"".join(map(_token, tokens))}</div>'
        f"{table if helped else ''}</div>"
    )


def visible(text: str) -> str:
    """Write characters visibly that steer how text is shown, or that show nothing."""
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    if char in _HARMLESS or unicodedata.category(char) not in _HIDDEN:
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"‹U+{ord(char):04X}›"


def _safe(text: str) -> str:
    return escape(visible(text))


def _token(token: Shown) -> str:
    said = f"p {token.p:.3g} · model alone {token.p_lm:.3g} · {token.share:.0%} from the store"
    if token.source:
        said += f" · {token.source}"
    return _shade(token.share, _safe(token.text).replace("\n", "↵\n") or "·", _safe(said))


def _shade(share: float, inner: str, title: str = "") -> str:
    said = f' title="{title}"' if title else ""
    return f'<span{said} style="background:rgb({STORE_COLOR} / {share * DEEPEST:.2f})">{inner}</span>'


def _perplexity(probs: Sequence[float]) -> float:
    return math.exp(-sum(math.log(max(p, 1e-30)) for p in probs) / len(probs))

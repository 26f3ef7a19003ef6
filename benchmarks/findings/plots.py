"""Lines in an SVG file, written by hand: no plotting library is needed for so little."""

import math
from collections.abc import Sequence
from html import escape

from finding import Plot

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 36, 48
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")
"""Of Okabe and Ito, told apart by everybody."""


def svg(plot: Plot) -> str:
    """Draw a plot."""
    lines = {name: _finite(points, plot.log_x) for name, points in plot.lines.items()}
    xs = [x for points in lines.values() for x, _ in points] or [0.0]
    ys = [y for points in lines.values() for _, y in points] or [0.0]
    x_at = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, plot.log_x)
    low, high = _roomy(min(ys), max(ys))
    y_at = _scale(low, high, HEIGHT - BOTTOM, TOP, False)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 20, plot.title, "start", 'font-weight="bold"'),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, plot.x),
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(plot.y)}</text>",
    ]
    for y in _ticks(low, high):
        parts.append(_line(LEFT, y_at(y), WIDTH - RIGHT, y_at(y), "#dddddd"))
        parts.append(_text(LEFT - 6, y_at(y) + 4, f"{y:.6g}", "end"))
    for x in _powers(min(xs), max(xs)) if plot.log_x else _ticks(min(xs), max(xs)):
        parts.append(_line(x_at(x), HEIGHT - BOTTOM, x_at(x), HEIGHT - BOTTOM + 4, "#000000"))
        parts.append(_text(x_at(x), HEIGHT - BOTTOM + 17, f"{x:,.6g}"))
    parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#000000"))
    for number, (name, points) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        dash = "" if number < len(COLORS) else ' stroke-dasharray="5 3"'
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        if len(points) <= 20:
            parts += [
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3" fill="{color}"/>' for x, y in points
            ]
        at = TOP + 16 * number
        parts.append(_line(WIDTH - RIGHT + 12, at, WIDTH - RIGHT + 30, at, color, f'stroke-width="2"{dash}'))
        parts.append(_text(WIDTH - RIGHT + 35, at + 4, name, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _finite(points: Sequence[tuple[float, float]], log_x: bool) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)]


def _scale(low: float, high: float, start: float, stop: float, log: bool):
    """Return a function from values to coordinates."""
    of = math.log if log else float
    low, high = of(low) if low or not log else 0.0, of(high) if high or not log else 1.0
    return lambda value: start + (of(value) - low) / ((high - low) or 1.0) * (stop - start)


def _roomy(low: float, high: float) -> tuple[float, float]:
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers between two values."""
    rough = (high - low) / about or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [step * number for number in range(first, first + 2 * about) if step * number <= high]


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten between two values; of two where there are not two of ten."""
    if low <= 0:
        return []
    for base in (10, 2):
        first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
        if last > first:
            break
    return [float(base) ** number for number in range(first, last + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" {more}/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'

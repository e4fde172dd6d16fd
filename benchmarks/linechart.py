"""A few line charts side by side as SVG text, for the figures of the docs: plain values in, a small file out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 300
"""Of one panel, in pixels; the margins around its axes:"""
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 46
LEGEND_LINE = 16
CAPTION_HEIGHT = 24


@dataclass(frozen=True)
class Series:
    """A line through `points` (x, y); `dashed` lines have no marks at their points."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Axes that start at 0 and end at `x_max` and `y_max` (None = a round number above all points)."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_max: float | None = None
    y_max: float | None = None


def svg(panels: Sequence[Panel], caption: str = "") -> str:
    """The panels from left to right, each with its legend, above `caption`."""
    legend = LEGEND_LINE * max(len(panel.series) for panel in panels)
    height = HEIGHT + legend + CAPTION_HEIGHT
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate({index * WIDTH} 0)">', *_panel(panel), "</g>"]
    parts.append(_text(width / 2, height - 8, caption, "middle", size=11, colour="#555"))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(panel: Panel) -> list[str]:
    points = [point for series in panel.series for point in series.points]
    x_ticks = ticks(panel.x_max or max(x for x, _ in points))
    y_ticks = ticks(panel.y_max or max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = x / x_ticks[-1], y / y_ticks[-1]
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 20, panel.title, size=14)]
    for tick in y_ticks:
        (x, y), (end, _) = place(0, tick), place(x_ticks[-1], tick)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(x - 6, y + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        x, y = place(tick, 0)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 4:.1f}" stroke="#888"/>')
        parts.append(_text(x, y + 17, f"{tick:g}", "middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 10, panel.x_label, "middle"))
    parts.append(
        f'<text transform="translate(14 {(HEIGHT - BOTTOM + TOP) / 2:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(panel.y_label)}</text>"
    )
    for number, series in enumerate(panel.series):
        placed = [place(x, y) for x, y in series.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        dash = ' stroke-dasharray="5 4"' if series.dashed else ""
        line = f'fill="none" stroke="{series.colour}" stroke-width="2"{dash}'
        parts.append(f'<polyline points="{path}" {line}/>')
        if not series.dashed:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{series.colour}"/>' for x, y in placed]
        y = HEIGHT + LEGEND_LINE * number
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + 28}" y2="{y}" {line}/>')
        parts.append(_text(LEFT + 36, y + 4, series.label))
    return parts


def ticks(largest: float) -> list[float]:
    """Round numbers from 0 to the first one that is not below `largest`, four to six of them."""
    step = largest / 5
    magnitude = 10.0 ** math.floor(math.log10(step))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= step * (1 - 1e-9))
    return [step * n for n in range(math.ceil(largest / step - 1e-9) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "start", *, size: int = 12, colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )

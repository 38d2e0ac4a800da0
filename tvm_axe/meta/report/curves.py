"""The report's drawings: each candidate's time as a dot, the best so far as a line, in SVG without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

__all__ = ["curve"]

_WIDTH, _HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 36
_TICKS = 5
_FEW, _MANY = 3, 8


def curve(xs: Sequence[float], seconds: Sequence[float | None], before: float | None, axis: str) -> str:
    """Draw times, on a logarithmic scale, over `xs`.

    Parameters
    ----------
    xs
        Where each candidate stands: its number, or when it was measured; ascending.
    seconds
        Its time; None, which is a mark at the upper edge, if it failed.
    before
        The untuned function's time, a dashed line if the scale reaches up to it without hiding the rest.
    axis
        What `xs` are.

    Returns
    -------
    str
        An ``svg`` element; its colours are the page's ``--best``, ``--dot``, ``--failed`` and ``--line``.
    """
    good = [s for s in seconds if s is not None]
    if not good:
        return "<p>no candidate ran</p>"
    low, high = min(good) / 1.1, max(good) * 1.1
    if before is not None and low < before < 10 * high:
        high = max(high, before * 1.1)
    right = max(xs) or 1.0

    def x_of(x: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / right

    def y_of(s: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * math.log(high / s) / math.log(high / low)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="best time against {html.escape(axis)}">']
    for tick in _ticks(low, high):
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick * 1e3:.3g}</text>')
    for tick in _round_steps(right):
        parts.append(f'<text x="{x_of(tick):.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 5}" text-anchor="end">{html.escape(axis)}</text>')
    parts.append(f'<text x="4" y="{_HEIGHT - 5}">ms</text>')
    if before is not None and low < before <= high:
        y = y_of(before)
        parts.append(f'<line class="before" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{y + 13:.1f}" text-anchor="end">untuned</text>')
    best = math.inf
    line: list[str] = []
    for x, s in zip(xs, seconds):
        if s is None:
            parts.append(f'<circle class="failed" cx="{x_of(x):.1f}" cy="{_TOP}" r="2.5"/>')
            continue
        parts.append(f'<circle class="dot" cx="{x_of(x):.1f}" cy="{y_of(s):.1f}" r="2"/>')
        if s < best:
            line.append(f"H{x_of(x):.1f}V{y_of(s):.1f}" if line else f"M{x_of(x):.1f} {y_of(s):.1f}")
            best = s
    parts.append(f'<path class="best" d="{"".join(line)}H{x_of(right):.1f}"/></svg>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round values between: 1, 2, 5, 10, ..., or evenly spaced ones where there are too few of these."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**n for n in decades for factor in (1, 2, 5) if low <= factor * 10.0**n <= high]
    if len(ticks) >= _FEW:
        return ticks[:: -(-len(ticks) // _MANY)]
    step = _round_step(high - low)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round_steps(right: float) -> list[float]:
    """0 and round numbers up to `right`."""
    step = _round_step(right)
    return [n * step for n in range(int(right / step) + 1)]


def _round_step(extent: float) -> float:
    """1, 2 or 5 times a power of ten, of which up to `_TICKS` go into the extent."""
    power = 10.0 ** math.floor(math.log10(extent / _TICKS))
    return power * next(factor for factor in (1, 2, 5, 10) if extent <= _TICKS * factor * power * 1.001)

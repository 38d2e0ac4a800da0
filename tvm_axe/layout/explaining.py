"""Derivations: how the result of an operation on a layout comes about, number by number.

Nothing is computed here a second time. What a derivation states is taken from the operation itself: `apply` and
`canonicalize` are asked about the layout's parts, one after another, and what changes is said; of every other
operation, the calls it makes of operations that have a law of their own are recorded as it runs.

>>> from tvm_axe.layout import Layout
>>> layout = Layout.parse("S[(2, 2, 8) : (1@tp, 1@warpid, 1)] + R[2 : 4@warpid] + 3")
>>> print(explain(layout, "apply", 3, 5, shape=(4, 8)))
apply S[(2, 2, 8) : (1@tp, 1@warpid, 1)] + R[2 : 4@warpid] + 3 to (3, 5) of shape (4, 8)
row-major position in (4, 8): 29 = 3 * 8 + 5
digits of 29 in (2, 2, 8): (1, 1, 5)
  D 2 : 1@tp      1 * 1@tp = 1@tp
  D 2 : 1@warpid  1 * 1@warpid = 1@warpid
  D 8 : 1         5 * 1 = 5
  R 2 : 4@warpid  0@warpid or 4@warpid
  O               3
points: 8 + 1@tp + 1@warpid; 8 + 1@tp + 5@warpid
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, Coordinate
from tvm_axe.layout.iters import Iter, on_axis
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.shapes import show
from tvm_axe.layout.swizzle import ComposeLayout

_LAW = re.compile(r"\bLaw(?:, (?P<when>[^:]*: )|: )(?P<law>.*)")
_DEEPEST = 2  # of the recorded calls: those of the operation, and those of what it calls


def explain(layout: Layout | ComposeLayout, op: str, *args: Any, **kwargs: Any) -> str:
    """Return how ``layout.op(*args, **kwargs)`` comes about, as lines of text.

    Parameters
    ----------
    layout : Layout or ComposeLayout
        The layout whose operation is explained.
    op : str
        The name of one of its operations.
    *args, **kwargs : Any
        What the operation takes.

    Raises
    ------
    LayoutError
        If a layout has no such operation; or whatever the operation raises.
    """
    kind = type(layout)
    said = {"explain", "show"}  # what a layout says of itself, rather than what is done with it
    public = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
    known = sorted(public - said)
    if op not in known:
        raise LayoutError(f"explain: a {kind.__name__} has no operation {op!r}; it has {', '.join(known)}")
    derive = _DERIVATIONS.get(op) if isinstance(layout, Layout) else None
    return "\n".join(derive(layout, *args, **kwargs) if derive else _recorded(layout, op, args, kwargs))


def _apply(layout: Layout, *index: int, shape: Sequence[int] | None = None) -> list[str]:
    points = layout.apply(*index, shape=shape)
    of = f" of shape {show(shape)}" if shape is not None else ""
    lines = [f"apply {layout} to {show(index)}{of}"]
    position: Any = index[0] if index else 0
    if shape is not None:
        # A layout whose one iter counts elements tells an element's position.
        (counted,) = Layout([Iter(layout.size(), 1, "x")]).apply(*index, shape=shape)
        position, nested = counted["x"], str(position)
        for digit, extent in zip(index[1:], shape[1:]):
            nested = f"{nested if nested.isdigit() else f'({nested})'} * {extent} + {digit}"
        lines.append(f"row-major position in {show(shape)}: {position} = {nested}")
    # So do iters that each have an axis to themselves, of their digits.
    apart = Layout([Iter(it.extent, 1, f"c{number}") for number, it in enumerate(layout.D)])
    (digits,) = apart.apply(position)
    counts = [digits[f"c{number}"] for number in range(len(layout.D))]
    lines.append(f"digits of {position} in {show([it.extent for it in layout.D])}: {show(counts)}")
    parts = []
    for it, count in zip(layout.D, counts):
        (moved,) = Layout([it]).apply(count)
        parts.append((f"D {it}", f"{count} * {on_axis(it.stride, it.axis)} = {on_axis(moved[it.axis], it.axis)}"))
    for it in layout.R:
        copies = sorted(point[it.axis] for point in Layout([], [it]).apply(0))
        parts.append((f"R {it}", " or ".join(on_axis(copy, it.axis) for copy in copies)))
    if layout.O:
        parts.append(("O", _point(layout.O)))
    width = max((len(part) for part, _ in parts), default=0)
    lines += (f"  {part.ljust(width)}  {value}" for part, value in parts)
    return [*lines, f"points: {'; '.join(sorted(map(_point, points)))}"]


def _canonicalize(layout: Layout) -> list[str]:
    lines = [f"canonicalize {layout}"]
    before = Layout([])
    for number, it in enumerate(layout.D):
        after = Layout(layout.D[: number + 1]).canonicalize()
        lines.append(f"  D {it}: {_change(before.D, after.D, it)}")
        before = after
    before = Layout([])
    for number, it in enumerate(layout.R):
        after = Layout([], layout.R[: number + 1]).canonicalize()
        moved = {axis: after.O[axis] - before.O[axis] for axis in {*before.O, *after.O}}
        offset = "".join(f", and O moves by {on_axis(by, axis)}" for axis, by in sorted(moved.items()) if by)
        lines.append(f"  R {it}: {_change(before.R, after.R, it)}{offset}")
        before = after
    return [*lines, f"result: {layout.canonicalize()}"]


def _change(before: tuple[Iter, ...], after: tuple[Iter, ...], it: Iter) -> str:
    """Return what one more iter did to canonical ones."""
    if after == before:
        return "of one step, dropped"
    gone, come = [[i for i in one if i not in other] for one, other in ((before, after), (after, before))]
    if not gone:
        return "stays" if come == [it] else f"becomes {', '.join(map(str, come))}"
    return f"with {', '.join(map(str, gone))} makes {', '.join(map(str, come))}"


def _local_region(layout: Layout, shape: Sequence[int], mesh: Mesh, device: int) -> list[str]:
    region, local = layout.local_region(shape, mesh, device), layout.local_shape(shape, mesh)
    cuts, coords = layout.cuts(shape, mesh), mesh.coords(device)
    at = ", ".join(f"{axis}={position}" for axis, position in coords.items())
    lines = [
        f"local_region of device {device} of {mesh} in {layout}, of shape {show(shape)}",
        f"  device {device}: {at}",
    ]
    for dim, (extent, block, part) in enumerate(zip(shape, local, region)):
        cut = cuts[dim]
        if not cut:
            lines.append(f"  dimension {dim}: no axis cuts it: {part.start}:{part.stop}")
            continue
        position, blocks = 0, math.prod(mesh[axis] for axis in cut)
        for axis in cut:
            position = position * mesh[axis] + coords[axis]
        whole = f"{position * block}:{(position + 1) * block}"
        clipped = f"{part.start}:{part.stop}"
        lines.append(
            f"  dimension {dim}: {_cutting(cut)} {extent} into {blocks} blocks of {block}; block {position} is {whole}"
            + (f", of which {extent} leaves {clipped}" if clipped != whole else "")
        )
    return [*lines, f"region: {', '.join(f'{part.start}:{part.stop}' for part in region) or 'a scalar'}"]


def _cutting(cut: tuple[str, ...]) -> str:
    return f"{' and '.join(cut)} cut{'s' if len(cut) == 1 else ''}"


_DERIVATIONS: Mapping[str, Callable[..., list[str]]] = {
    "apply": _apply,
    "canonicalize": _canonicalize,
    "local_region": _local_region,
}


def _recorded(layout: Layout | ComposeLayout, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    method = vars(type(layout))[op]
    static = isinstance(method, staticmethod)
    function = method.__func__ if static else method
    arguments = args if static else (layout, *args)
    recorder = _Recorder(function.__code__)
    result = recorder.run(lambda: function(*arguments, **kwargs))
    lines = [_call(op, inspect.signature(function).bind(*arguments, **kwargs).arguments)]
    law = _law(function)
    if law:
        lines.append(f"law: {law}")
    lines += dict.fromkeys(f"{'  ' * depth}{call} = {result}" for depth, call, result in recorder.steps)
    return [*lines, f"result: {_value(result)}"]


class _Recorder:
    """Runs a function, and notes the calls of operations that have a law, with their arguments and results."""

    def __init__(self, whole: CodeType) -> None:
        self.whole = whole
        self.steps: list[tuple[int, str, str]] = []
        self.open: list[tuple[FrameType, int]] = []

    def run(self, function: Callable[[], Any]) -> Any:
        previous = sys.getprofile()
        sys.setprofile(self._event)
        try:
            return function()
        finally:
            sys.setprofile(previous)

    def _event(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event == "call" and _is_step(frame) and (code is not self.whole or self.open):
            if len(self.open) < _DEEPEST:
                arguments = {name: frame.f_locals[name] for name in _parameters(code)}
                self.steps.append((1 + len(self.open), _call(code.co_name, arguments), ""))
            self.open.append((frame, len(self.steps) - 1))
        elif event == "return" and self.open and self.open[-1][0] is frame:
            _, number = self.open.pop()
            if len(self.open) < _DEEPEST:
                depth, call, _ = self.steps[number]
                self.steps[number] = (depth, call, _value(value))


def _is_step(frame: FrameType) -> bool:
    """Return whether a call is of an operation on layouts that states a law."""
    code = frame.f_code
    documented = code.co_consts and isinstance(code.co_consts[0], str) and _LAW.search(code.co_consts[0])
    return bool(documented) and frame.f_globals.get("__name__", "").startswith("tvm_axe.layout.")


def _parameters(code: CodeType) -> tuple[str, ...]:
    more = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + more]


def _law(function: Callable[..., Any]) -> str | None:
    """Return the law in a docstring, in one line, without the marks of code."""
    for paragraph in (inspect.getdoc(function) or "").split("\n\n"):
        found = _LAW.search(" ".join(paragraph.split()))
        if found:
            return f"{found['when'] or ''}{found['law']}".replace("`", "")
    return None


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    given = ", ".join(
        _value(value) if key in ("self", "layout") else f"{key}={_value(value)}" for key, value in arguments.items()
    )
    return f"{name}({given})"


def _value(value: Any) -> str:
    """Return a value as a reader of layouts would write it."""
    if isinstance(value, Coordinate):
        return _point(value)
    if isinstance(value, frozenset) and all(isinstance(point, Coordinate) for point in value):
        return f"{{{'; '.join(sorted(map(_point, value)))}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_value, value))}{',' if len(value) == 1 else ''})"
    return str(value)


def _point(point: Mapping[str, Any]) -> str:
    """Return a point as a layout's offset is written."""
    terms: Iterable[str] = (on_axis(position, axis) for axis, position in point.items())
    return " + ".join(sorted(terms, key=lambda term: ("@" in term, term))) or on_axis(0, LINEAR_MEMORY)

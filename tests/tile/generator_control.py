"""What is around the operations of random programs: loops that may end, branches, knobs, sizes that callers give."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from generator import Maker

BLOCKS = ("", "", "", "", "range", "if", "while", "break", "continue", "knob")


def enter(maker: Maker) -> bool:
    """Open a loop, a condition, or nothing; returns how much deeper it is."""
    kind = maker.choose(BLOCKS)
    if kind:
        _OPENED[kind](maker)
    return bool(kind)


def _range(maker: Maker) -> None:
    maker.line(f"for r{maker.indent} in range({maker.choose([1, 2, 3])}):")
    maker.indent += 1


def _if(maker: Maker) -> None:
    maker.line(f"if {_condition(maker, 'n')}:")
    maker.indent += 1


def _while(maker: Maker) -> None:
    """As many iterations as data or the block say, few enough that numbers stay exact."""
    left = f"w{len(maker.allocs)}"
    maker.allocs.append(f'        {left} = tile.local((1,), "int32")')
    maker.line(f"{left}[0] = {maker.choose(['m + n', f'T.min({maker.counts}[m], 3)', '2 - n'])}")
    maker.line(f"while {left}[0] > {maker.choose([0, 1])}:")
    maker.indent += 1
    maker.line(f"{left}[0] = {left}[0] - 1")
    if maker.choose([False, False, True]):
        _jump(maker, maker.choose(["break", "continue"]), f"{left}[0]")


def _ends(word: str) -> object:
    def opened(maker: Maker) -> None:
        step = f"r{maker.indent}"
        maker.line(f"for {step} in range({maker.choose([2, 3])}):")
        maker.indent += 1
        _jump(maker, word, step)

    return opened


def _jump(maker: Maker, word: str, step: str) -> None:
    maker.line(f"if {_condition(maker, step)}:")
    maker.line(f"    {word}")


def _condition(maker: Maker, step: str) -> str:
    return maker.choose(["m > 0", f"m + {step} < 2", f"{maker.counts}[m] > 1", f"{maker.counts}[m] > {step}"])


def _knob(maker: Maker) -> None:
    """A loop of as many iterations as a knob, or a branch that it decides."""
    name = add_knob(maker, [0, 1, 2])
    maker.line(maker.choose([f"for r{maker.indent} in range({name}):", f"if {name} == 1:", f"if {name} < m + 1:"]))
    maker.indent += 1


_OPENED = {
    "range": _range,
    "if": _if,
    "while": _while,
    "break": _ends("break"),
    "continue": _ends("continue"),
    "knob": _knob,
}


def add_knob(maker: Maker, values: list[int]) -> str:
    """A knob of the program, which is its default or another of its values."""
    name = f"knob{len(maker.knobs)}"
    maker.head.append(f"    {name} = tile.knob({name!r}, {tuple(values)}, default={maker.choose(values)})")
    maker.knobs[name] = maker.choose(values)
    return name


def add_options(maker: Maker) -> None:
    """Sometimes more of what the kernel is told."""
    if maker.choose([False, False, False, True]):
        maker.options += f", blocks_per_sm={maker.choose(['1', '2', add_knob(maker, [1, 2])])}"


def open_sizes(maker: Maker) -> None:
    """Sometimes the source's rows or columns are what its caller gives, of which the program may assume something."""
    sizes = list(maker.arrays[-1].shape)
    names = [maker.choose([None, None, None, f"open{d}"]) for d in range(2)]
    if names == [None, None]:
        return
    shape = ", ".join(repr(name) if name else str(size) for name, size in zip(names, sizes))
    maker.params[-1] = f'{maker.source}: T.Buffer(({shape}), "{maker.arrays[-1].dtype.name}")'
    for name, size in zip(names, sizes):
        if name is None:
            continue
        maker.head.insert(0, f"    {name} = T.int32()")
        divisor = maker.choose([d for d in (1, 2, 3, 8, 16, 64) if size % d == 0])
        assumed = {"": None, "multiple": f"{name} % {divisor} == 0", "least": f"{name} >= {maker.choose([0, size])}"}
        for kind in {"", maker.choose(list(assumed)), maker.choose(list(assumed))} - {""}:
            maker.head.append(f"    tile.assume({assumed[kind]})")

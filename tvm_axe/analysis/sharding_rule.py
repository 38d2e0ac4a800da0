"""The sharding rule of a function of blocks: which dimensions of its inputs and outputs move together.

>>> from tvm.script import tirx as T
>>> @T.prim_func(s_tir=True)
... def matmul(A: T.Buffer((4, 8), "float32"), B: T.Buffer((8, 6), "float32"), C: T.Buffer((4, 6), "float32")):
...     for i, j, k in T.grid(4, 6, 8):
...         with T.sblock("C"):
...             vi, vj, vk = T.axis.remap("SSR", [i, j, k])
...             with T.init():
...                 C[vi, vj] = T.float32(0)
...             C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
>>> print(sharding_rule(matmul))
[a, b], [b, c] -> [a, c]; b: sum

A *factor* is a class of digits of dimensions that move together, as the factors of Shardy's sharding rules
(openxla.org/shardy); there they are written for each operator, here they are derived from a function's accesses and no
operator is named. In the text, ``ab`` are two digits of one dimension, the major first, as reshapes have them; ``a|b``
are parts one after the other, as of a concatenation; ``a(-1:1)`` has a halo of one index on each side; ``.`` belongs to
no factor.

==================== ===============================================================================================
reshape              ``[a, bc] -> [a, b, c]``
concatenate          ``[a, b], [a, c] -> [a, b|c]``
repeat               ``[a, b] -> [a, bc]``
sum of rows          ``[a, b] -> [a]; b: sum``
softmax              ``[a, b] -> [a, b]; b: opaque (max T_softmax_maxelem, sum T_softmax_expsum)``
embedding            ``[a, b], [c] -> [c, b]; a: gather``
convolution          ``[a, b, c(-1:1)], [d, b, e] -> [a, d, c]; c: halo; b, e: sum``
==================== ===============================================================================================
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from tvm import tirx

from tvm_axe.analysis.accesses import LeafBlock, NotAnalysed, leaf_blocks
from tvm_axe.analysis.axes import Axes, Segment
from tvm_axe.analysis.directions import Direction, directions
from tvm_axe.analysis.expressions import loads_in
from tvm_axe.analysis.parameters import parameters
from tvm_axe.analysis.partials import partial_buffers
from tvm_axe.analysis.patterns import REDUCE, SPATIAL
from tvm_axe.analysis.shifts import Axis
from tvm_axe.analysis.sizes import Sizes, at_sizes

__all__ = ["Factor", "Operand", "Part", "ShardingRule", "sharding_rule"]

_ORDER = ("spatial", "halo", "reduction", "gather", "opaque")


@dataclass(frozen=True)
class Factor:
    """A class of digits of dimensions that move together.

    Attributes
    ----------
    name : str
        One letter, with a number behind it from the 27th on.
    extent : int
        How many indices there are to share.
    kind : "spatial", "reduction", "halo", "gather" or "opaque"
        What a device can do that has a share of these indices of the inputs, and the rest of the inputs whole.
        *Spatial*: the same share of the outputs. *Halo*: the same, if it also has the neighbouring indices that each
        `Part.reach` says. *Reduction*: outputs that the devices' outputs are combined to. *Gather*: the same, where
        the index in the one dimension that has the factor is looked up: a device counts nothing where what is looked
        up is another's. *Opaque*: nothing, but for `combined`.
    combiner : str or None
        What the devices' outputs of a reduction are combined with: "sum", "prod", "max" or "min".
    partial : tuple[int, ...]
        The positions of the outputs that a shared reduction leaves to be combined; the others are as if it weren't
        shared.
    stages : tuple[str, ...]
        The reductions inside the function that would have to be combined before it goes on, of an opaque factor.
    combined : tuple of (int, str)
        The buffers that these reduce to and with what, by position among parameters and what is allocated, if that is
        all there is to it: with them combined a factor is as if spatial.
    symbolic : bool
        Whether the extent is what one that calls decide is taken to be. Such a factor is all of its dimensions.
    """

    name: str
    extent: int
    kind: Literal["spatial", "reduction", "halo", "gather", "opaque"]
    combiner: str | None = None
    partial: tuple[int, ...] = ()
    stages: tuple[str, ...] = ()
    combined: tuple[tuple[int, str], ...] = ()
    symbolic: bool = False

    @property
    def means(self) -> str:
        """What sharing it means, in a word: the kind, or what the results are combined with."""
        stages = f" ({', '.join(self.stages)})" if self.stages else ""
        return f"{self.kind if self.kind == 'gather' else self.combiner or self.kind}{stages}"


@dataclass(frozen=True)
class Part:
    """The indices of a dimension from `begin` to `end`, which count the digits of `factors`, major first.

    `reach`: for index t of the one factor, the indices from ``t + reach[0]`` to ``t + reach[1]`` are needed.
    """

    begin: int
    end: int
    factors: tuple[str, ...]
    reach: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return ("".join(self.factors) or ".") + ("({}:{})".format(*self.reach) if self.reach != (0, 0) else "")


Dimension = tuple[Part, ...]


@dataclass(frozen=True)
class Operand:
    """A parameter as an input or an output, or the iterators of a block: the parts of each dimension."""

    name: str
    dims: tuple[Dimension, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the dimensions."""
        return tuple(parts[-1].end for parts in self.dims)

    @property
    def factors(self) -> frozenset[str]:
        """The names of the factors that it has."""
        return frozenset(name for parts in self.dims for part in parts for name in part.factors)

    def __str__(self) -> str:
        return f"[{', '.join('|'.join(map(str, parts)) for parts in self.dims)}]"


@dataclass(frozen=True)
class ShardingRule:
    """A rule of which dimensions of a function's inputs and outputs move together, and what follows for shares.

    Attributes
    ----------
    factors : tuple[Factor, ...]
        All factors.
    inputs, outputs : tuple[Operand, ...]
        The parameters in their order; one that is both (see `tvm_axe.analysis.directions`) is in both.
    blocks : tuple[Operand, ...]
        The iterators of each block that has none inside: which of them a device that has a share runs.
    inner : tuple[Operand, ...]
        The buffers that the function allocates for itself, in their order.
    reason : str
        Why nothing is known, where that is so: every dimension then has no factor.
    """

    factors: tuple[Factor, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    blocks: tuple[Operand, ...] = ()
    inner: tuple[Operand, ...] = ()
    reason: str = ""

    def __getitem__(self, name: str) -> Factor:
        """Return the factor called `name`; KeyError if there is none."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Factor]:
        return {factor.name: factor for factor in self.factors}

    def __str__(self) -> str:
        left, right = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        kinds: dict[str, list[str]] = {}
        for factor in sorted(self.factors, key=lambda factor: _ORDER.index(factor.kind)):
            if factor.kind != "spatial":
                kinds.setdefault(factor.means, []).append(factor.name)
        rest = [f"{', '.join(names)}: {means}" for means, names in kinds.items()]
        return "; ".join([f"{left} -> {right}", *rest, *([self.reason] if self.reason else [])])


def sharding_rule(func: tirx.PrimFunc, sizes: Sizes | None = None) -> ShardingRule:
    """Derive the sharding rule of a function of blocks.

    Parameters
    ----------
    func : PrimFunc
        A function over whole tensors, scheduled or not.
    sizes : Sizes, optional
        What symbolic extents are taken to be, where there are such. Dimensions that have one are a factor where they
        are read and stored at iterators of the same extent alone, or belong to none: the rule holds at all sizes.

    Returns
    -------
    ShardingRule
        The rule. What can't be seen to move together is opaque or belongs to no factor: whole on every device.

    Raises
    ------
    InputError
        If a parameter isn't a buffer, or has a symbolic extent that `sizes` doesn't say.
    """
    sizes, known = sizes or {}, at_sizes(func, sizes or {})
    parameters(known)  # refuses what has no constant shape; two parameters may have one name, as outputs of importers
    params, sides = list(func.params), directions(known)
    shapes = [tuple(int(extent) for extent in param.shape) for param in known.params]
    outputs = [param for param, side in zip(params, sides) if side.is_output]
    try:
        blocks = leaf_blocks(func, sizes)
    except NotAnalysed as error:
        whole = [Operand(p.name, tuple((Part(0, n, ()),) for n in shape)) for p, shape in zip(params, shapes)]
        return _rule((), whole, whole, (), (), sides, str(error))
    axes = Axes(blocks, outputs)

    def dims(of: Literal["buffer", "block"], number: int | None, shape: Sequence[int]) -> list[tuple[Segment, ...]]:
        if number is None:
            return [(Segment(0, extent, ()),) for extent in shape]
        return [axes.segments(Axis(of, number, position)) for position in range(len(shape))]

    seen = [dims("buffer", axes.number(param), shape) for param, shape in zip(params, shapes)]
    iterators = [dims("block", k, block.extents) for k, block in enumerate(blocks)]
    inner = [dims("buffer", n, buffer.shape) for n, buffer in enumerate(axes.buffers)]
    allocated = list(func.body.block.alloc_buffers)
    room = [[int(extent) for extent in buffer.shape] for buffer in known.body.block.alloc_buffers]
    held = [dims("buffer", axes.number(buffer), shape) for buffer, shape in zip(allocated, room)]
    own = [*params, *allocated]
    extents, opaque, halos, symbolic = axes.classes()
    for operand in [*inner, *iterators]:
        opaque |= _repeated(operand)
    given = [param for param, side in zip(params, sides) if side.is_input]
    elsewhere = {n for dims in [*held, *iterators] for segments in dims for part in segments for n in part.classes}
    names = [_name(number) for number in range(len(extents))]
    factors = []
    for number, (name, extent) in enumerate(zip(names, extents)):
        plain = Factor(name, extent, "opaque", symbolic=number in symbolic)
        if number in opaque:
            sums = None if number in elsewhere else _looked_up(number, blocks, params, seen, given, outputs)
            factors.append(plain if sums is None else replace(plain, kind="gather", combiner="sum", partial=sums))
        elif number in halos:
            factors.append(replace(plain, kind="halo"))
        else:
            factors.append(_factor(number, replace(plain, kind="spatial"), blocks, iterators, given, outputs, own))

    def parts(segments: tuple[Segment, ...], exact: bool) -> Dimension:
        found: list[Part] = []
        for begin, end, classes, reach in segments:
            if found and not classes and not found[-1].factors:
                begin = found.pop().begin
            found.append(Part(begin, end, tuple(names[n] for n in classes), (0, 0) if exact else reach))
        return tuple(found)

    ins, outs = (
        [Operand(p.name, tuple(parts(d, exact) for d in found)) for p, found in zip(params, seen)]
        for exact in (False, True)
    )
    runs = [Operand(b.name, tuple(parts(d, False) for d in found)) for b, found in zip(blocks, iterators)]
    rest = [Operand(b.name, tuple(parts(d, False) for d in found)) for b, found in zip(allocated, held)]
    return _rule(tuple(factors), ins, outs, tuple(runs), tuple(rest), sides, "")


def _rule(
    factors: tuple[Factor, ...],
    ins: Sequence[Operand],
    outs: Sequence[Operand],
    blocks: tuple[Operand, ...],
    inner: tuple[Operand, ...],
    sides: Sequence[Direction],
    reason: str,
) -> ShardingRule:
    inputs = tuple(operand for operand, side in zip(ins, sides) if side.is_input)
    outputs = tuple(operand for operand, side in zip(outs, sides) if side.is_output)
    return ShardingRule(factors, inputs, outputs, blocks, inner, reason)


def _name(number: int) -> str:
    letter, again = chr(ord("a") + number % 26), number // 26
    return f"{letter}{again}" if again else letter


def _repeated(operand: Sequence[Sequence[Segment]]) -> set[int]:
    """Return the factors that are in two dimensions or twice in a part, as on a diagonal."""
    parts = [part.classes for segments in operand for part in segments]
    in_part = {number for classes in parts for number, times in Counter(classes).items() if times > 1}
    dims = [{number for part in segments for number in part.classes} for segments in operand]
    return in_part.union(*(a & b for a, b in itertools.combinations(dims, 2)))


def _in_all_parts(number: int, operands: Sequence[Sequence[Sequence[Segment]]]) -> bool:
    """Return whether each dimension that has a factor has it in all of its parts."""
    having = [[number in part.classes for part in segments] for dims in operands for segments in dims]
    return all(all(found) or not any(found) for found in having)


def _factor(
    number: int,
    factor: Factor,
    blocks: Sequence[LeafBlock],
    iterators: Sequence[Sequence[Sequence[Segment]]],
    given: Sequence[tirx.Buffer],
    outputs: Sequence[tirx.Buffer],
    buffers: Sequence[tirx.Buffer],
) -> Factor:
    """Return `factor` as one that blocks reduce over, if they do; `buffers` are all, parameters first."""

    def having(kind: int) -> set[int]:
        return {
            k
            for k, (block, dims) in enumerate(zip(blocks, iterators))
            for which, segments in zip(block.kinds, dims)
            if which == kind and any(number in part.classes for part in segments)
        }

    reducing = having(REDUCE)
    if not reducing:
        return factor
    combiners = {blocks[k].combiner for k in reducing}
    # Iterations of another part of the same iterator would be counted on every device.
    if _in_all_parts(number, iterators) and len(combiners) == 1 and (combiner := next(iter(combiners))) is not None:
        partial = partial_buffers(blocks, reducing, having(SPATIAL), combiner, given)
        if partial is not None:
            left = (n for n, out in enumerate(outputs) if any(out.same_as(buffer) for buffer in partial))
            return replace(factor, kind="reduction", combiner=combiner, partial=tuple(left))
    stages = (f"{blocks[k].combiner or 'other'} {blocks[k].written[0].name}" for k in sorted(reducing))
    inside = _in_all_parts(number, iterators)
    combined = _combined(blocks, sorted(reducing), [*given, *outputs], buffers) if inside else ()
    return replace(factor, kind="opaque", stages=tuple(stages), combined=combined)


def _combined(
    blocks: Sequence[LeafBlock], reducing: Sequence[int], known: Sequence[tirx.Buffer], buffers: Sequence[tirx.Buffer]
) -> tuple[tuple[int, str], ...]:
    """Return what reductions are combined to, and with what, before blocks go on; empty where that isn't all.

    `known` are the buffers that are seen outside of the function, before or after.
    """
    writers = [buffer for block in blocks for buffer in _distinct(block.written)]
    if len(_distinct(writers)) < len(writers):
        return ()
    found = []
    for k in reducing:
        combiner, (buffer, *more) = blocks[k].combiner, _distinct(blocks[k].written)
        if more or combiner not in ("sum", "max", "min") or _is_one(buffer, known):
            return ()
        found.append((next(at for at, other in enumerate(buffers) if other.same_as(buffer)), combiner))
    return tuple(found)


def _looked_up(
    number: int,
    blocks: Sequence[LeafBlock],
    params: Sequence[tirx.Buffer],
    seen: Sequence[Sequence[Sequence[Segment]]],
    given: Sequence[tirx.Buffer],
    outputs: Sequence[tirx.Buffer],
) -> tuple[int, ...] | None:
    """Return which outputs are sums of the devices' where a factor is an input's dimension in which one block looks up.

    None where it is anything else.
    """
    having = [
        (param, dim)
        for param, dims in zip(params, seen)
        for dim, segments in enumerate(dims)
        if any(number in part.classes for part in segments)
    ]
    if len(having) != 1 or not _is_one(having[0][0], given):
        return None
    ((buffer, dim),) = having
    reading = [k for k, block in enumerate(blocks) for access in block.accesses if access.buffer.same_as(buffer)]
    block = blocks[reading[0]] if len(reading) == 1 else None
    if block is None or block.value is None or (block.combiner != "sum" and REDUCE in block.kinds):
        return None
    indices = [load.indices[dim] for load in loads_in(block.value) if load.source.same_as(buffer)]
    if len(indices) != 1 or not loads_in(indices[0]):
        return None
    partial = partial_buffers(blocks, {reading[0]}, set(), "sum", given)
    return None if partial is None else tuple(n for n, out in enumerate(outputs) if _is_one(out, partial))


def _is_one(buffer: tirx.Buffer, buffers: Sequence[tirx.Buffer]) -> bool:
    return any(other.same_as(buffer) for other in buffers)


def _distinct(buffers: Sequence[tirx.Buffer]) -> list[tirx.Buffer]:
    return [buffer for at, buffer in enumerate(buffers) if not _is_one(buffer, buffers[:at])]

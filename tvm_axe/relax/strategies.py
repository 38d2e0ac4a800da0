"""What an operator may do on the devices of a mesh axis: forms of its values, which follow from its sharding rule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from tvm import s_tir, tirx

from tvm_axe.analysis.accesses import LeafBlock, NotAnalysed, leaf_blocks
from tvm_axe.analysis.blocks import all_blocks, nested_blocks, statements
from tvm_axe.analysis.partials import carries_terms
from tvm_axe.analysis.patterns import Pattern, pattern_of
from tvm_axe.analysis.sharding_rule import Dimension, Operand, ShardingRule, sharding_rule
from tvm_axe.analysis.sizes import number
from tvm_axe.collective.engine import Rates
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.layout.shares import Run, Share
from tvm_axe.lower.dealing import Assigned, shares_of
from tvm_axe.lower.shares import is_sharable
from tvm_axe.relax.forms import WHOLE, Form, form_of, move
from tvm_axe.relax.kernels_of_shares import cuts_groups
from tvm_axe.relax.ways import Stage, Strategy

__all__ = ["Operator"]

_SHARED = ("spatial", "reduction", "gather")


class Operator:
    """A function that a model calls, and its ways to run on `devices`.

    Parameters
    ----------
    func : PrimFunc
        Inputs first; equal functions are one operator.
    inputs : int
        How many inputs it has.
    devices : int
        How many devices there are.
    rates : Rates
        How fast they are.
    sizes : Sequence of (Var, int)
        What the variables of symbolic extents typically are.
    deals_symbolic : bool
        Whether dimensions of symbolic extents are shared also where no neighbour has them shared.
    overwrites : int
        How many of the inputs, the last ones, are its outputs, which it stores to.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        inputs: int,
        devices: int,
        rates: Rates,
        sizes: Sequence[tuple[tirx.Var, int]] = (),
        deals_symbolic: bool = True,
        overwrites: int = 0,
    ) -> None:
        self.overwrites = overwrites
        self.func, self.inputs, self.devices, self.rates = func, inputs, devices, rates
        self.sizes, self.deals_symbolic = dict(sizes), deals_symbolic
        self.outputs = len(func.params) - inputs + overwrites
        self._found: dict[frozenset[tuple[int, Form]], list[Strategy]] = {}
        self._tried: dict[tuple[tuple[tuple[str, ...], Share], ...], Strategy | None] = {}

    @cached_property
    def rule(self) -> ShardingRule:
        """Its sharding rule."""
        return sharding_rule(self.func, self.sizes)

    @cached_property
    def is_sharable(self) -> bool:
        """Whether its function can be made one of shares."""
        plain = len(self.rule.inputs) == self.inputs and len(self.rule.outputs) == self.outputs
        return plain and not self.rule.reason and is_sharable(self.func)

    @cached_property
    def blocks(self) -> list[LeafBlock]:
        """Its blocks."""
        try:
            return leaf_blocks(self.func, self.sizes)
        except NotAnalysed:
            return []

    @cached_property
    def operations(self) -> tuple[int, ...]:
        """Of each block, the multiplications and additions of a product that it is; 0 of any other."""
        if not self.is_sharable:
            return tuple(self._of_product(block) for block in all_blocks(self.func.body))
        nests = statements(self.func.body.block.body)
        return tuple(self._of_product(nested_blocks(nest)[0].block) for nest in nests)

    def _of_product(self, block: s_tir.SBlock) -> int:
        """The multiplications and additions of a block that is a product; 0 of any other."""
        if pattern_of(block) is not Pattern.CONTRACTION:
            return 0
        return 2 * math.prod(number(iv.dom.extent, self.sizes) or 1 for iv in block.iter_vars)

    def whole_because(self) -> str:
        """Why every device computes all of it, in words."""
        if not self.is_sharable:
            return self.rule.reason or "it isn't nests of loops around one block of stores each"
        ways = [way for way in self.strategies(frozenset()) if way.share < 1]
        if not ways:
            return f"no dimension of it can be shared by {self.devices} devices: {self.rule}"
        least = min(way.seconds for way in ways)
        return f"whole it takes {self._seconds(None) * 1e6:.3g} us, and shared {least * 1e6:.3g} us and moves"

    def strategies(self, seeds: frozenset[tuple[int, Form]]) -> list[Strategy]:
        """The ways to run it.

        Parameters
        ----------
        seeds : frozenset of (int, Form)
            Forms that neighbours give or want: of which of its parameters, inputs first.
        """
        if seeds not in self._found:
            best: dict[tuple[tuple[Form, ...], tuple[Form, ...]], Strategy] = {}
            ways: list[Assigned] = [{}]
            if self.is_sharable and self.devices > 1:
                ways += [*self._own, *(way for at, form in sorted(seeds, key=str) for way in self._fitting(at, form))]
            for way in ways:
                if (tried := tuple(way.items())) not in self._tried:  # neighbours offer the same ways again and again
                    self._tried[tried] = self._evaluated(way)
                found = self._tried[tried]
                if found is None:
                    continue
                key = found.ins, found.outs
                if key not in best or found.seconds < best[key].seconds:
                    best[key] = found
            self._found[seeds] = [*best.values(), *self._carrying]
        return self._found[seeds]

    @cached_property
    def _carrying(self) -> list[Strategy]:
        """The ways to leave terms of a sum of what are terms already, where that is less than what it is made of.

        So the sum of what experts leave is moved, and not what each has left.
        """
        if not self.is_sharable or self.devices == 1 or self.overwrites or any(self.operations):
            return []
        sources, targets, found = self.func.params[: self.inputs], self.func.params[self.inputs :], list[Strategy]()
        sizes = [math.prod(number(extent, self.sizes) or 1 for extent in param.shape) for param in self.func.params]
        terms = Form(partial="sum")
        for at, source in enumerate(sources):
            if sum(sizes[self.inputs :]) < sizes[at] and carries_terms(self.blocks, source, targets):
                ins = tuple(terms if other == at else WHOLE for other in range(self.inputs))
                found.append(Strategy(ins, (terms,) * len(targets), self._seconds(None)))
        return found

    @cached_property
    def _params(self) -> tuple[Operand, ...]:
        return (*self.rule.inputs, *self.rule.outputs)

    @cached_property
    def _own(self) -> list[Assigned]:
        """Each digit of each dimension in blocks, and the parts of a dimension together."""
        found: list[Assigned] = []
        for parts in dict.fromkeys(dim for operand in self._params for dim in operand.dims):
            for part in parts:
                for at in range(len(part.factors)):
                    found += [{names: share} for names, share in self._leading(part.factors[at:])]
            if len(parts) > 1:
                found += self._completed(parts, {})
        return found

    def _leading(self, names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Share]]:
        """Blocks of the fewest leading digits that there are enough of; and of the fewest that are dealt out evenly."""
        enough = False
        for end in range(1, len(names) + 1):
            if not self._is_one_kind(names[:end]):
                return
            extent = math.prod(self.rule[name].extent for name in names[:end])
            if extent < self.devices or (enough and extent % self.devices):
                continue
            if self.rule[names[0]].symbolic:
                if self.deals_symbolic:
                    yield tuple(names[:end]), Share.of_any(extent, self.devices)
                return
            yield tuple(names[:end]), Share.blocks(extent, self.devices)
            if extent % self.devices == 0:
                return
            enough = True

    def _is_one_kind(self, names: Sequence[str]) -> bool:
        factors = [self.rule[name] for name in names]
        kinds = {(factor.kind, factor.combiner, factor.partial, factor.combined) for factor in factors}
        if any(factor.symbolic for factor in factors) and (len(factors) > 1 or factors[0].kind != "spatial"):
            return False  # terms would have to be counted by devices, by numbers that calls decide
        return len(kinds) == 1 and (factors[0].kind in _SHARED or bool(factors[0].combined))

    def _completed(self, parts: Dimension, given: Assigned) -> list[Assigned]:
        """`given` with those parts of a dimension that it leaves open in blocks of their own; empty if one can't be."""
        merged = dict(given)
        for part in parts:
            if any(set(names) & set(part.factors) for names in merged):
                continue
            own = next(self._leading(part.factors), None)
            if own is None:
                return []
            merged[own[0]] = own[1]
        return [merged]

    def _fitting(self, at: int, form: Form) -> list[Assigned]:
        """The ways in which parameter `at` has a form."""
        if form.share is None or form.dim is None:
            return []
        assigned: dict[tuple[str, ...], Share] = {}
        for part in self._params[at].dims[form.dim]:
            share = form.share.part(part.begin, part.end)
            if share is None:
                return []
            if share.is_whole:
                continue
            found = self._on_factors(part.factors, share)
            if found is None or (found[0] in assigned and assigned[found[0]] != found[1]):
                return []
            names = set(found[0])
            if any(set(other) & names and other != found[0] for other in assigned):
                return []
            assigned[found[0]] = found[1]
        if not assigned:
            return []
        used = {name for names in assigned for name in names}
        ways: list[Assigned] = [assigned]
        for parts in dict.fromkeys(dim for operand in self._params for dim in operand.dims):
            if len(parts) > 1 and any(used & set(part.factors) for part in parts):
                more = [*self._completed(parts, assigned), *self._alike(parts, assigned)]
                ways += [way for way in more if len(way) > len(assigned)]
        return ways

    def _alike(self, parts: Dimension, given: Assigned) -> list[Assigned]:
        """`given` with the parts that it leaves open shared as one that it shares, as packed queries and keys are.

        Empty if parts have different digits.
        """
        ways = list[Assigned]()
        for part in parts:
            own = next((names for names in given if set(names) <= set(part.factors)), None)
            if own is None:
                continue
            extents = [self.rule[name].extent for name in part.factors]
            merged = dict(given)
            at = part.factors.index(own[0])
            for other in parts:
                if any(set(names) & set(other.factors) for names in merged):
                    continue
                if [self.rule[name].extent for name in other.factors] != extents:
                    break
                merged[other.factors[at : at + len(own)]] = given[own]
            else:
                ways.append(merged)
        return ways

    def _on_factors(self, names: Sequence[str], share: Share) -> tuple[tuple[str, ...], Share] | None:
        """A share of an index as one of the fewest digits that it is a share of."""
        extents = [self.rule[name].extent for name in names]
        end, inner = len(names), 1
        runs = share.runs
        while end > 1 and all(_inside(run) % (inner * extents[end - 1]) == 0 for run in runs):
            end, inner = end - 1, inner * extents[end - 1]
        begin, outer = 0, 1
        while len(runs) == 1 and begin < end - 1 and runs[0].outer % (outer * extents[begin]) == 0:
            begin, outer = begin + 1, outer * extents[begin]
        together = tuple(names[begin:end])
        if not together or not self._is_one_kind(together):
            return None
        if (begin, end) == (0, len(names)):
            return together, share
        return together, Share.of([_stripped(run, outer, inner) for run in runs])

    def _evaluated(self, assigned: Assigned) -> Strategy | None:
        rule, devices = self.rule if assigned else None, self.devices
        if rule is None:
            return Strategy((WHOLE,) * self.inputs, (WHOLE,) * self.outputs, self._seconds(None))
        if not self._is_one_kind([name for names in assigned for name in names]):
            return None
        shares = [shares_of(operand, rule, assigned, devices) for operand in self._params]
        inner = [shares_of(operand, rule, assigned, devices) for operand in rule.inner]
        if any(found is None for found in inner):
            return None
        forms = [None if found is None else form_of(found) for found in shares]
        runs = [shares_of(operand, rule, assigned, devices) for operand in rule.blocks]
        if any(form is None for form in forms) or any(found is None for found in runs):
            return None
        known = [form for form in forms if form is not None]
        ins, outs = known[: self.inputs], known[self.inputs :]
        if cuts_groups(self.func, lambda at: ins[at].local(self.func.params[at].shape)):
            return None  # a product with groups of codes, of which a device would have parts
        factor = rule[next(iter(assigned))[0]]
        if self.overwrites and (factor.combined or factor.kind in ("reduction", "gather")):
            return None  # what a device leaves would be terms, of what all had
        if factor.kind == "gather" and any(len(s.runs) > 1 or s.runs[0].outer > 1 for s in assigned.values()):
            return None
        if factor.kind in ("reduction", "gather"):
            if not factor.partial:
                return None
            outs = [
                Form(partial=factor.combiner or "") if at in factor.partial else form for at, form in enumerate(outs)
            ]
            if any(form.partial in ("prod",) for form in outs):
                return None
        local = [math.prod(share.local for share in found) for found in runs if found is not None]
        stages = self._combining(factor.combined, [*shares, *inner])
        whole = sum(self.operations)
        done = sum(
            count * points // max(1, math.prod(leaf.extents))
            for count, points, leaf in zip(self.operations, local, self.blocks)
        )
        return Strategy(
            tuple(ins), tuple(outs), self._seconds((local, known)) + sum(stage.how.seconds for stage in stages),
            done / whole if whole else 1.0, tuple(assigned.items()), stages,
        )  # fmt: skip

    def _combining(
        self, combined: Sequence[tuple[int, str]], shares: Sequence[Sequence[Share] | None]
    ) -> tuple[Stage, ...]:
        """What is combined inside the function before it goes on."""
        buffers, found = [*self.func.params, *self.func.body.block.alloc_buffers], []
        for at, combiner in combined:
            of = shares[at]
            assert of is not None  # it is a share, or the way isn't one
            shape, dtype = tuple(share.local for share in of), str(buffers[at].dtype)
            itemsize = max(1, dtype_bytes(dtype, 1))
            how = move(Form(partial=combiner), WHOLE, shape, itemsize, self.devices, self.rates.link)
            assert how is not None  # whatever is partial can be combined
            found.append(Stage(at, combiner, how))
        return tuple(found)

    @cached_property
    def _touched(self) -> list[list[tuple[int | None, int, str]]]:
        """Of each block the buffers that it touches: which parameter each is, its elements and their type."""
        numbers = {param: at for at, param in enumerate(self.func.params)}
        shapes = [{access.buffer: access.shape for access in leaf.accesses} for leaf in self.blocks]
        return [
            [(numbers.get(buffer), math.prod(shape), str(buffer.dtype)) for buffer, shape in each.items()]
            for each in shapes
        ]

    def _seconds(self, shared: tuple[Sequence[int], Sequence[Form]] | None) -> float:
        """The time of a device: of its operations, or of what it reads and writes, whichever takes longer."""
        total = 0.0
        for at, (leaf, count, touched) in enumerate(zip(self.blocks, self.operations, self._touched)):
            whole = math.prod(leaf.extents)
            points = whole if shared is None else shared[0][at]
            moved = 0
            for param, size, dtype in touched:
                if shared is not None:
                    fraction = points / whole if param is None else shared[1][param].fraction()
                    size = math.ceil(size * fraction)
                moved += dtype_bytes(dtype, min(size, points))
            total += max(count * points / max(1, whole) / self.rates.operations, moved / self.rates.memory)
        return total


def _inside(run: Run) -> int:
    """How many indices lie together in a run, whoever holds it."""
    return run.length if run.is_whole else run.inner


def _stripped(run: Run, outer: int, inner: int) -> Run:
    """A run without digits before and behind, of which there are so many."""
    if run.is_whole:
        length = run.length // (outer * inner)
        return Run(1, length, 1, run.starts, length)
    return Run(run.outer // outer, run.extent, run.inner // inner, run.starts, run.size)

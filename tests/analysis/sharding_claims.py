"""What a sharding rule claims, tried: a device is given other numbers than the true ones wherever it needs none.

The whole function is run for each device, compiled by stock TVM. Of each input only what the rule says that the device
needs is right; all else is NaN, and in a second run other random numbers, as a maximum or a mask can swallow a NaN. The
device's share of the outputs has to come out bit for bit. Of a shared reduction each device runs its own iterations
alone (masks are built into the blocks), and the devices' outputs combined have to be the true ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe.analysis.blocks import all_blocks
from tvm_axe.analysis.directions import directions
from tvm_axe.analysis.sharding_rule import Factor, Operand, Part, ShardingRule, sharding_rule

REDUCE = tirx.IterVar.CommReduce
COMBINE = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}
RTOL = 1e-5

Owned = Mapping[tuple[str, ...], np.ndarray]
"""For factors that are shared as one index: who has which, as [devices, extent of the first factor, ...]."""


@dataclass(frozen=True)
class Claim:
    """That each device can compute a share, or a partial result, from the share of the inputs that it has.

    `combiner` and `partial` are those of a shared reduction; `claimed` is who has which share of the outputs, where
    that is said to be another than of the inputs.
    """

    label: str
    rule: ShardingRule
    owned: Owned
    combiner: str | None = None
    partial: tuple[int, ...] = ()
    claimed: Owned | None = None

    @property
    def devices(self) -> int:
        return len(next(iter(self.owned.values())))


# ---- Which elements are whose


def elements(operand: Operand, rule: ShardingRule, owned: Owned, device: int) -> np.ndarray:
    """A mask of the elements that belong to the device's share: those that do for some index that they don't have."""
    mask = np.ones(operand.shape, bool)
    for names, shares in owned.items():
        held = shares[device]
        if len(names) == 1 and rule[names[0]].kind == "halo":
            mask = mask & _with_halo(operand, names[0], held)
            continue
        for axis in range(held.ndim):  # index -1: the element hasn't this digit
            held = np.concatenate([held, held.any(axis=axis, keepdims=True)], axis=axis)
        mask = mask & held[tuple(_digit(operand, rule, name) for name in names)]
    return mask


def _digit(operand: Operand, rule: ShardingRule, name: str) -> np.ndarray:
    """The index of factor `name` that each element has, -1 where it has none."""
    found = np.full(operand.shape, -1)
    for dim, parts in enumerate(operand.dims):
        at = np.full(operand.shape[dim], -1)
        for part in parts:
            if name in part.factors:
                extents = [rule[other].extent for other in part.factors]
                at[part.begin : part.end] = np.indices(extents)[part.factors.index(name)].ravel()
        shape = [-1 if d == dim else 1 for d in range(len(operand.shape))]
        found = np.maximum(found, at.reshape(shape))
    return found


def _with_halo(operand: Operand, name: str, held: np.ndarray) -> np.ndarray:
    """A mask of the elements whose index is that of one that is held, or around it as far as the part reaches."""
    for dim, parts in enumerate(operand.dims):
        if name in parts[0].factors:
            low, high = parts[0].reach
            mine = [any(held[max(0, at - high) : max(0, at - low + 1)]) for at in range(operand.shape[dim])]
            return np.array(mine).reshape([-1 if d == dim else 1 for d in range(len(operand.shape))])
    return np.array(True)


# ---- Functions whose reductions are masked


class Runnable:
    """A function, compiled once, with a mask for each iterator that a block reduces over."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.rule = sharding_rule(func)
        self.sides = directions(func)
        self.shapes = [tuple(int(extent) for extent in param.shape) for param in func.params]
        self.dtypes = [np.dtype(str(param.dtype)) for param in func.params]
        self.masks: list[tuple[int, int, int]] = []
        masked = self._masked(func).with_attr("global_symbol", "main")
        self._main = tvm.compile(tvm.IRModule({"main": masked}), target="llvm")["main"]

    def _masked(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        params, changed = [], {}
        leaves = [block for block in all_blocks(func.body) if len(all_blocks(block)) == 1]
        for k, block in enumerate(leaves):
            buffers = {}
            for j, iv in enumerate(block.iter_vars):
                if iv.iter_type == REDUCE:
                    self.masks.append((k, j, int(iv.dom.extent)))
                    buffers[iv.var] = tirx.decl_buffer((int(iv.dom.extent),), "int32", f"mask_{k}_{j}")
            if buffers:
                params += buffers.values()
                changed[block] = _masked_block(block, buffers)
        body = tvm_ffi.structural_map(func.body, (s_tir.SBlock, lambda block: changed.get(block, block)))
        return tirx.PrimFunc([*func.params, *params], body, func.ret_type, func.attrs)

    def __call__(self, inputs: Sequence[np.ndarray], masks: Sequence[np.ndarray], fill: object) -> list[np.ndarray]:
        given = iter(inputs)
        arrays = [
            next(given) if side.is_input else np.full(shape, fill if dtype.kind == "f" else 0, dtype)
            for side, shape, dtype in zip(self.sides, self.shapes, self.dtypes)
        ]
        tensors = [tvm.runtime.tensor(np.array(array, order="C")) for array in [*arrays, *masks]]
        self._main(*tensors)
        return [tensor.numpy() for tensor, side in zip(tensors, self.sides) if side.is_output]

    def every(self) -> list[np.ndarray]:
        """Masks by which all iterations run."""
        return [np.ones(extent, "int32") for _, _, extent in self.masks]

    def share(self, rule: ShardingRule, owned: Owned, device: int) -> list[np.ndarray]:
        """Masks by which those iterations of reductions run that are the device's."""
        return [
            elements(Operand("", (rule.blocks[k].dims[j],)), rule, owned, device).astype("int32")
            for k, j, _ in self.masks
        ]


def _masked_block(block: s_tir.SBlock, buffers: Mapping[tirx.Var, tirx.Buffer]) -> s_tir.SBlock:
    own = [tirx.BufferLoad(buffer, [var]) != 0 for var, buffer in buffers.items()]
    condition = own[0] if len(own) == 1 else tirx.all(*own)

    def masked(store: tirx.BufferStore) -> tirx.BufferStore:
        old = tirx.BufferLoad(store.buffer, store.indices)
        return tirx.BufferStore(store.buffer, tirx.if_then_else(condition, store.value, old), store.indices)

    reads = [*block.reads, *(tirx.BufferRegion(b, [ir.Range.from_min_extent(var, 1)]) for var, b in buffers.items())]
    body = tvm_ffi.structural_map(block.body, (tirx.BufferStore, masked))
    return s_tir.SBlock(
        block.iter_vars, reads, block.writes, block.name_hint, body, block.init, block.alloc_buffers,
        block.match_buffers, block.annotations,
    )  # fmt: skip


# ---- The check


class Judge:
    """A function with inputs and its true outputs, by which claims are judged."""

    def __init__(self, func: tirx.PrimFunc, draw: Callable[[np.random.Generator], Sequence[np.ndarray]] | None = None):
        self.run = Runnable(func)
        self.rng = np.random.default_rng(0)
        self._draw = draw or self._random
        self.inputs = self._draw(self.rng)
        self.true = self.run(self.inputs, self.run.every(), np.nan)
        assert all(np.isfinite(out.astype("float64")).all() for out in self.true), "the true outputs aren't finite"

    def _random(self, rng: np.random.Generator) -> list[np.ndarray]:
        arrays = []
        for shape, dtype, side in zip(self.run.shapes, self.run.dtypes, self.run.sides):
            whole = rng.integers(0, 2, shape) if dtype.kind in "iub" else np.abs(rng.standard_normal(shape)) + 0.1
            arrays += [whole.astype(dtype)] if side.is_input else []  # positive, as variances must be
        return arrays

    def _spoiled(self, claim: Claim, device: int, nan: bool) -> list[np.ndarray]:
        spoiled = []
        for true, other, operand in zip(self.inputs, self._draw(self.rng), claim.rule.inputs):
            if true.dtype.kind == "f" and nan:
                other = np.full_like(true, np.nan)
            elif true.dtype.kind in "iu" and set(np.unique(true)) <= {0, 1}:
                other = 1 - true
            spoiled.append(np.where(elements(operand, claim.rule, claim.owned, device), true, other))
        return spoiled

    def wrong(self, claim: Claim) -> str:
        """What is wrong with a claim; empty if nothing is."""
        rule, partial = claim.rule, claim.partial
        terms = {nan: [list[np.ndarray]() for _ in self.true] for nan in (True, False)}
        for device in range(claim.devices):
            masks = self.run.every() if claim.combiner is None else self.run.share(rule, claim.owned, device)
            for nan in (True, False):
                fill = np.nan if nan else 7.0
                found = self.run(self._spoiled(claim, device, nan), masks, fill)
                for number, (out, true) in enumerate(zip(found, self.true)):
                    terms[nan][number].append(out)
                    mine = elements(rule.outputs[number], rule, claim.claimed or claim.owned, device)
                    if number not in partial and not np.array_equal(out[mine], true[mine]):
                        return f"output {number} of device {device} differs, given {'NaN' if nan else 'other numbers'}"
        for number in partial:
            for outs in (terms[True][number], terms[False][number]):
                combined, true = COMBINE[claim.combiner](outs, axis=0), self.true[number]  # type: ignore[index]
                if not np.allclose(combined, true, rtol=RTOL, atol=RTOL * np.abs(true).max()):
                    return f"output {number}: the devices' results don't combine to the true one"
        return ""


# ---- Claims of a rule, and false ones


def blocks(extents: Sequence[int], devices: int) -> np.ndarray:
    """Shares in blocks of one index over digits of `extents`: equal ones, or if these can't be, they differ by one."""
    count = int(np.prod(extents))
    owner = np.arange(count) * devices // count
    return (owner == np.arange(devices)[:, None]).reshape(devices, *extents)


def scattered(extents: Sequence[int], devices: int, rng: np.random.Generator) -> np.ndarray:
    """Shares of which each index goes to any device."""
    return rng.integers(0, devices, extents) == np.arange(devices).reshape(-1, *[1] * len(extents))


def claims(rule: ShardingRule, rng: np.random.Generator) -> Iterator[Claim]:
    """What a rule says: each factor shared, digits and parts of a dimension shared together, and all at once."""
    # What is looked up a function of the rule's own leaves to be masked: tests/lower/test_shares.py runs these.
    known = [factor for factor in rule.factors if factor.kind not in ("opaque", "gather") and factor.extent > 1]
    for factor in known:
        for devices in (2, 3, 4):
            yield _shared(rule, [factor], {(factor.name,): blocks([factor.extent], devices)}, f"in {devices} blocks")
        yield _shared(rule, [factor], {(factor.name,): scattered([factor.extent], 3, rng)}, "scattered over 3")
    for dims in {parts for operand in (*rule.inputs, *rule.outputs) for parts in operand.dims}:
        groups = [[rule[name] for name in part.factors] for part in dims if part.factors]
        kinds = {(factor.kind, factor.combiner, factor.partial) for group in groups for factor in group}
        together = [factor for group in groups for factor in group]
        if len(kinds) == 1 and together[0].kind in ("spatial", "reduction") and len(set(together)) == len(together) > 1:
            for devices in (2, 3, 4):
                owned = {tuple(f.name for f in group): blocks([f.extent for f in group], devices) for group in groups}
                yield _shared(rule, together, owned, f"together in {devices} blocks")
    free = [factor for factor in known if factor.kind in ("spatial", "halo")]
    if len(free) > 1:
        owned = {(factor.name,): rng.integers(0, 2, (3, factor.extent)).astype(bool) for factor in free}
        yield _shared(rule, free, owned, "shared at random")


def _shared(rule: ShardingRule, factors: Sequence[Factor], owned: Owned, how: str) -> Claim:
    label = f"{rule}: {', '.join(factor.name for factor in factors)} {how}"
    return Claim(label, rule, owned, factors[0].combiner, factors[0].partial)


def false_claims(rule: ShardingRule) -> Iterator[Claim]:
    """What a rule doesn't say, and what differs a little from what it says."""
    given = frozenset().union(*(operand.factors for operand in rule.inputs))
    left = frozenset().union(*(operand.factors for operand in rule.outputs))
    for factor in rule.factors:
        if factor.name not in given or factor.extent < 2 or _stays(rule, factor.name):
            continue
        owned = {(factor.name,): blocks([factor.extent], 2)}
        claim = Claim(f"{rule}: {factor.name}", rule, owned)
        if factor.kind in ("opaque", "reduction"):
            yield replace(claim, label=f"{claim.label} as if it were spatial")
        if factor.kind == "opaque" and factor.stages and factor.name not in left:
            partial = tuple(range(len(rule.outputs)))
            yield replace(claim, label=f"{claim.label} as if sums followed", combiner="sum", partial=partial)
        if factor.kind == "reduction" and factor.partial:
            for combiner in {*COMBINE} - {factor.combiner}:
                label = f"{claim.label}, results combined by {combiner}"
                yield replace(claim, label=label, combiner=combiner, partial=factor.partial)
            label, one = f"{claim.label} with one device left out", {(factor.name,): owned[factor.name,][:1]}
            yield replace(claim, label=label, owned=one, combiner=factor.combiner, partial=factor.partial)
        if factor.kind in ("spatial", "halo") and factor.name in left:
            swapped = {(factor.name,): owned[factor.name,][::-1]}
            yield replace(claim, label=f"{claim.label} with devices swapped", claimed=swapped)
        if factor.kind == "halo" and factor.name in left:
            for narrow in ((1, 0), (0, -1)):
                changed = _narrower(rule, factor.name, narrow)
                if changed != rule:
                    yield replace(claim, label=f"{claim.label} with a halo narrower by {narrow}", rule=changed)


def _stays(rule: ShardingRule, name: str) -> bool:
    """Whether a factor is of one parameter alone that is given and left: a share of it may well be all one needs."""
    having = [[operand.name for operand in side if name in operand.factors] for side in (rule.inputs, rule.outputs)]
    return rule[name].kind == "opaque" and having[0] == having[1] == [operand.name for operand in rule.outputs]


def _narrower(rule: ShardingRule, name: str, by: tuple[int, int]) -> ShardingRule:
    def part(old: Part) -> Part:
        low, high = old.reach
        if name not in old.factors or low == high:
            return old
        return replace(old, reach=(low + by[0], high + by[1]))

    inputs = [replace(x, dims=tuple(tuple(map(part, parts)) for parts in x.dims)) for x in rule.inputs]
    return replace(rule, inputs=tuple(inputs))

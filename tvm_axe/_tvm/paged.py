"""Upstream's paged cache of keys and values: what a model calls for it, and the functions that the cache calls.

A call that makes one says the numbers of heads, and the functions of the module that the cache calls, which upstream's
frontend makes of these numbers by the generators that are called here: some for CPUs, and others for GPUs, whose blocks
and threads follow from the heads and from how many threads the target has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax.frontend.nn.llm import kv_cache as upstream
from tvm.target import Target

__all__ = ["PAGED", "PAGED_ATTENDS", "PAGED_CREATES", "PAGED_POSITIONS", "PagedCache", "paged_cache", "paged_call"]

PAGED = "vm.builtin.attention_kv_cache_"
"""What the names of the runtime's functions of a cache begin with, which do work of their own."""
PAGED_CREATES = "vm.builtin.paged_attention_kv_cache_create"
PAGED_ATTENDS = f"{PAGED}attention_with_fused_qkv"
PAGED_POSITIONS = f"{PAGED}get_query_positions"

# What the constructor is called with, by place.
_CONFIG, _HEADS, _GROUPS, _SIZE, _VALUE_SIZE, _KINDS = 0, 2, 3, 4, 5, 6
_SCALE, _THETA, _FACTORS, _EMPTY = 9, 10, 11, 12
_FUNCTIONS = 13
_COUNT, _ROTATES = 14, 10  # of the functions
_PAGE, _WINDOW = 3, 5  # in the configuration
_SCALED = ("llama3", "llama4")
_PARTS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class _Generators(NamedTuple):
    """Upstream's generators of what a cache calls on a kind of device: attention, and copies within pages.

    Attributes
    ----------
    ragged, prefill, decode : callable
        Of attention to keys at hand, and to those in pages.
    trees : tuple[callable, callable]
        Of attention to trees, in the order of the cache's functions.
    copies, compacts : callable
        Of copying a page, and places within pages.
    """

    ragged: Any
    prefill: Any
    decode: Any
    trees: tuple[Any, Any]
    copies: Any
    compacts: Any


_ON_CPU = _Generators(
    upstream._attention_prefill_ragged_cpu,
    upstream._attention_prefill_cpu,
    upstream._attention_decode_cpu,
    (upstream.tree_attn_cpu, upstream.tree_attn_with_paged_kv_cache_cpu),
    upstream._copy_single_page_cpu,
    upstream._compact_kv_copy_cpu,
)
_ON_GPU = _Generators(
    upstream._attention_prefill_ragged,
    upstream._attention_prefill,
    upstream._attention_decode,
    (upstream.tree_attn_with_paged_kv_cache, upstream.tree_attn),
    upstream._copy_single_page,
    upstream._compact_kv_copy,
)


class PagedCache(NamedTuple):
    """What the call of a constructor says of a cache.

    Attributes
    ----------
    heads, groups : int
        The heads of queries, and of keys and values.
    size, value_size : int
        The columns of a head of queries and keys, and of values.
    layers : int
        How many there are.
    dtype : str
        Of keys and values.
    scale, theta : float
        Of the angles of positions.
    window : int
        Of layers with one.
    page : Expr
        The tokens of a page.
    functions : tuple[GlobalVar, ...]
        The functions of the module that it calls, in order.
    """

    heads: int
    groups: int
    size: int
    value_size: int
    layers: int
    dtype: str
    scale: float
    theta: float
    window: int
    page: tirx.Expr
    functions: tuple[ir.GlobalVar, ...]

    @property
    def rotates(self) -> ir.GlobalVar:
        """The function that turns queries and keys by their positions."""
        return self.functions[_ROTATES]

    def told(self, rotates: tirx.PrimFunc) -> Iterator[dict[str, Any]]:
        """Yield what upstream's generators may have been told beside, the likeliest first.

        Parameters
        ----------
        rotates : PrimFunc
            The function that turns queries and keys, in whose numbers some of it is.
        """
        yield {"rotary_dim": self.size, "rope_scaling": {}}
        scalings = [{}, {"rope_type": "gptj"}, *self._scalings(rotates)]
        for rotated in (self.size, *range(self.size - 2, 0, -2)):
            for scaling in scalings:
                yield {"rotary_dim": rotated, "rope_scaling": scaling}

    def _scalings(self, rotates: tirx.PrimFunc) -> Iterator[dict[str, Any]]:
        """Yield the kinds of scaled angles of which a function may have the numbers, low frequencies beginning at 1."""
        found = _numbers(rotates)
        for kind in _SCALED:
            one, other = (
                _numbers(self.rotating(self.heads, self.groups, self.size, {"rope_type": kind} | dict(zip(_PARTS, of))))
                for of in ((2.0, 3.0, 5.0, 64.0), (7.0, 11.0, 29.0, 256.0))
            )
            if len(found) != len(one):
                continue
            # Where the numbers are that follow from the parts, in the order of the formula: each at its first place.
            places = {number: at for at, number in reversed([*enumerate(one)]) if number != other[at]}
            slope, begin, less = (found[at] for at in sorted(places.values()))
            if min(slope, begin, less) > 0:
                most = round(slope * 2 * math.pi / begin)
                yield {"rope_type": kind} | dict(zip(_PARTS, (round(1 / less, 4), 1.0, round(1 + 1 / begin, 4), most)))

    def rotating(self, heads: int, groups: int, rotary_dim: int, rope_scaling: dict[str, Any]) -> tirx.PrimFunc:
        """Return the function by which a cache of so many heads turns queries and keys, as is `told`."""
        return upstream.llama_rope_with_position_map(
            self.theta, self.scale, self.size, heads, groups, self.dtype, rope_scaling, rotary_dim
        )

    def generated(
        self, heads: int, groups: int, gpu: Target | None, rotary_dim: int, rope_scaling: dict[str, Any]
    ) -> list[tirx.PrimFunc]:
        """Return the functions that a cache of so many heads calls, in order: on a GPU, or on a CPU without one."""
        size, dtype = self.size, self.dtype
        of = _ON_CPU if gpu is None else _ON_GPU
        target = {} if gpu is None else {"target": gpu}

        def attends(generator: Any, *more: Any, **named: Any) -> tirx.PrimFunc:
            return generator(groups, heads, *more, rope_scaling=rope_scaling, **named, **target)

        return [
            upstream._kv_cache_transpose_append(groups, size, dtype),
            upstream._kv_cache_transpose_append_mla(size, dtype),
            attends(of.ragged, size, self.value_size, dtype),
            attends(of.prefill, size, dtype, False),
            attends(of.decode, size, dtype, False),
            attends(of.prefill, size, dtype, True, sliding_window_size=self.window),
            attends(of.decode, size, dtype, True),
            *(attends(tree, size, dtype) for tree in of.trees),
            self._merges(heads, gpu),
            self.rotating(heads, groups, rotary_dim, rope_scaling),
            of.copies(groups, self.page, size, dtype, **target),
            upstream._kv_cache_debug_get_kv(self.layers, groups, size, dtype),
            of.compacts(groups, size, dtype, **target),
        ]

    def _merges(self, heads: int, gpu: Target | None) -> tirx.PrimFunc:
        """Return the function that merges what was attended to in two parts."""
        if gpu is None:
            return upstream._merge_state_inplace_cpu(self.dtype)
        return upstream._merge_state_inplace(heads, self.value_size, self.dtype, gpu)


def paged_cache(call: relax.Call) -> PagedCache | None:
    """Return what the call of a constructor says; None if it isn't as upstream's frontend makes it."""
    given = call.args[1:]
    if len(given) < _FUNCTIONS or not all(isinstance(given[at], ir.Constant) for at in (_HEADS, _GROUPS, _FACTORS)):
        return None
    config, kinds = (list(given[at].values) for at in (_CONFIG, _KINDS))
    window = int(config[_WINDOW]) if len(config) > _WINDOW else 0
    heads, groups, size, value_size = (int(given[at].value) for at in (_HEADS, _GROUPS, _SIZE, _VALUE_SIZE))
    scale, theta = given[_SCALE].value, given[_THETA].value
    dtype = str(given[_EMPTY].ty.dtype)
    functions = tuple(_functions(given[_FUNCTIONS:]))
    if len(functions) != _COUNT:
        return None
    return PagedCache(
        heads, groups, size, value_size, len(kinds), dtype, scale, theta, window, config[_PAGE], functions
    )


def paged_call(
    call: relax.Call, heads: int, groups: int, functions: Sequence[ir.GlobalVar], empty: relax.Expr
) -> relax.Call:
    """Return the call of a constructor for other heads, with functions in place of its own, and another empty value."""
    name, *given = call.args
    own = iter(functions)
    for at, number in ((_HEADS, heads), (_GROUPS, groups)):
        given[at] = relax.prim_value(number)
    given[_EMPTY] = empty
    given[_FUNCTIONS:] = [_with(each, own) for each in given[_FUNCTIONS:]]
    return relax.Call(call.op, [name, *given], call.attrs, call.ty_args)


def _numbers(func: tirx.PrimFunc) -> list[float]:
    """The fractions that a function has, in order."""
    found: list[float] = []
    tvm_ffi.structural_walk(func.body, (tirx.FloatImm, lambda number: found.append(float(number.value))))
    return found


def _functions(given: Sequence[relax.Expr]) -> Iterator[ir.GlobalVar]:
    for each in given:
        if isinstance(each, relax.Tuple):
            yield from _functions(each.fields)
        elif isinstance(each, ir.GlobalVar):
            yield each


def _with(value: relax.Expr, functions: Iterator[ir.GlobalVar]) -> relax.Expr:
    if isinstance(value, relax.Tuple):
        return relax.Tuple([_with(each, functions) for each in value.fields])
    return next(functions) if isinstance(value, ir.GlobalVar) else value

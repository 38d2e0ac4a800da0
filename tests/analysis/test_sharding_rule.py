"""Sharding rules: as they read, what each claims tried by running, and what is false seen to be."""

import functools
import re

import numpy as np
import pytest
from sharded_functions import (
    FUNCTIONS,
    OPERATORS,
    PROGRAMS,
    biased_in_place,
    joined_sum,
    legalized,
    outer_sum,
    overwritten,
    program,
    stencil,
)
from sharding_claims import Judge, claims, false_claims
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe import InputError
from tvm_axe.analysis import axes, partials, shifts
from tvm_axe.analysis import sharding_rule as deriving
from tvm_axe.analysis.sharding_rule import Factor, Part, sharding_rule

RULES = {
    "matmul, batched": ["[a, b, c], [a, c, d] -> [a, b, d]; c: sum"],
    "matmul, broadcast": ["[a, b], [c, b, d] -> [c, a, d]; b: sum"],
    "einsum": ["[a, b, c], [a, d, c] -> [a, b, d]; c: sum"],
    "softmax": ["[a, b, c] -> [a, b, c]; c: opaque (max T_softmax_maxelem, sum T_softmax_expsum)"],
    "log_softmax": ["[a, b, c] -> [a, b, c]; c: opaque (max T_softmax_maxelem, sum compute)"],
    "layer_norm": ["[a, b, c], [c], [c] -> [a, b, c]; c: opaque (sum p0_sum, sum p0_var_sum)"],
    "group_norm": ["[a, bc, d, e], [bc], [bc] -> [a, bc, d, e]; c, d, e: opaque (other p0_red_temp.v0)"],
    "instance_norm": ["[a, b, c, d], [b], [b] -> [a, b, c, d]; c, d: opaque (other p0_red_temp.v0)"],
    "rms_norm": ["[a, b, c], [c] -> [a, b, c]; c: opaque (sum T_multiply_red)"],
    "sum": ["[a, b, c] -> [a, c]; b: sum"],
    "mean": ["[a, b, c] -> [a]; b, c: sum"],
    "max": ["[a, b, c] -> [a, c]; b: max"],
    "min": ["[a, b, c] -> [a, c]; b: min"],
    "prod": ["[a, b, c] -> [a, c]; b: prod"],
    "variance": ["[a, b, c] -> [a, c]; b: opaque (sum p0_red, sum T_multiply_red)"],
    "argmax": ["[a, b, c] -> [a, c]; b: opaque (other p0_red_temp.v0)"],
    "reshape 2x24 to 6x8": ["[a, bc] -> [ab, c]"],
    "reshape 6x4 to 4x6": ["[a, b] -> [c, d]; a, b: opaque"],
    "reshape 4x8x6 to 32x6": ["[a, b, c] -> [ab, c]"],
    "permute_dims": ["[a, b, c] -> [c, a, b]"],
    "expand and broadcast": ["[a, b] -> [a, ., b]", "[a, ., b] -> [a, c, b]"],
    "repeat": ["[a, b, c] -> [a, bd, c]"],
    "tile": ["[a, b] -> [a, cb]"],
    "flip": ["[a, b] -> [a, c]; b: opaque"],
    "concat": ["[a, b], [a, c] -> [a, b|c]"],
    "stack": ["[a, b], [a, b] -> [a, c, b]"],
    "split, unequal": ["[a, b|c|d] -> [a, b], [a, c], [a, d]"],
    "strided_slice, first": ["[a, b, c] -> [a, ., c]; b: opaque"],
    "strided_slice, step 2": ["[a, bc] -> [a, b]; c: opaque"],
    "pad": ["[a, b] -> [a, c|b|d]"],
    "where": ["[a, b], [a, b] -> [a, b]", "[a, b], [a, b], [a, b] -> [a, b]"],
    "triu": ["[a, b, c] -> [a, b, c]"],
    "take, rows": ["[a, b], [c, d] -> [c, d, b]; a: gather"],
    "gather_elements": ["[a, b], [a, c] -> [a, c]; b: gather"],
    "scatter_elements": ["[a, b], [c, d], [e, f], [g, h] -> [g, h]; a, b, c, d, e, f, g, h: opaque"],
    "one_hot": ["[a, b] -> [a, b, c]"],
    "conv2d": ["[a, b, c(-1:1), d(-1:1)], [e, b, f, g] -> [a, e, c, d]; c, d: halo; b, f, g: sum"],
    "conv2d, valid": ["[a, b, c(0:2), d(0:1)], [e, b, f, g] -> [a, e, c, d]; c, d: halo; b, f, g: sum"],
    "conv2d, dilated": ["[a, b, c(-2:2), d(-2:2)], [e, b, f, g] -> [a, e, c, d]; c, d: halo; b, f, g: sum"],
    "conv2d, strided": ["[a, b, c, d], [e, b, f, g] -> [a, e, h, i]; b, f, g: sum; c, d: opaque"],
    "conv2d, patches": ["[a, b, cd, ef], [g, b, d, f] -> [a, g, c, e]; b, d, f: sum"],
    "conv2d, groups": ["[a, bc, d(-1:1), e(-1:1)], [bf, c, g, h] -> [a, bf, d, e]; d, e: halo; c, g, h: sum"],
    "conv2d, depthwise": ["[a, b, c(-1:1), d(-1:1)], [b, ., e, f] -> [a, b, c, d]; c, d: halo; e, f: sum"],
    "conv2d_transpose": ["[a, b, c, d], [b, e, f, g] -> [a, e, h, i]; h, i: halo; b, j, k: sum; c, d, f, g: opaque"],
    "batch_norm": ["[a, b, c, d], [b], [b], [b], [b] -> [a, b, c, d], [b], [b]"],
    "max_pool2d": ["[a, b, cd, ef] -> [a, b, c, e]; d, f: max"],
    "max_pool2d, overlapping": ["[a, b, c(-1:1), d(-1:1)] -> [a, b, c, d]; c, d: halo; e, f: max"],
    "avg_pool2d": ["[a, b, cd, ef] -> [a, b, c, e]; d, f: sum"],
    "adaptive_avg_pool2d": ["[a, b, c, d] -> [a, b, ., .]; c, d: sum"],
    "resize2d": ["[a, b, c, d] -> [a, b, e, f]; c, d: opaque"],
    "attention": [
        (
            "[a, b, c, d], [a, e, c, d], [a, e, c, f] -> [a, b, c, f]; d: opaque (sum T_batch_matmul_NT); "
            "e: opaque (max T_softmax_maxelem, sum T_softmax_expsum, sum T_batch_matmul_NN)"
        )
    ],
    "gelu": ["[a, b] -> [a, b]"],
    "program sgd": ["[a, b, c], [b, c], [b, c], [.] -> [b, c], [b, c]; a: opaque (sum total)"],
    "program adam": [
        ("[a, b, c], [b, c], [b, c], [b, c], [.], [d] -> [b, c], [b, c], [b, c]; a: opaque (sum total); d: opaque")
    ],
    "program adam_f16": [
        (
            "[a, b, c], [b, c], [b, c], [b, c], [.], [d] -> [b, c], [b, c], [b, c], [b, c]; "
            "a: opaque (sum total); d: opaque"
        )
    ],
    "program lamb": [
        (
            "[a, b, c], [b, c], [b, c], [b, c], [b], [.], [d] -> [b, c], [b, c], [b, c]; a: opaque (sum total); "
            "b: opaque (sum norms); c: opaque (sum squares); d, e, f: opaque"
        )
    ],
    "program mlp": ["[a, b], [b, c], [c], [a, c], [.] -> [a, c]; b: opaque (sum C)"],
    "program attention": [
        (
            "[a, b, c], [d, e, c, f], [e, f, g], [g], [a, b, g], [.] -> [a, b, g]; b, d: opaque; "
            "c: opaque (sum QKV); e: opaque (sum C); f: opaque (sum S, sum C)"
        )
    ],
    "program norm": ["[a, b], [b, c], [a, c], [c] -> [a, c]; b: opaque (sum C); c: opaque (sum squares)"],
    "program ag_mm": ["[a, b], [b, c] -> [a, c]; b: sum"],
    "program pipeline": ["[a, b, c], [a, c, d], [e, d], [e, b, d], [.] -> [e, b, d]; a: opaque; c: opaque (sum C)"],
    "program moe": [
        (
            "[a, b, c], [a, d, e], [d, c, f], [d, f, g], [a, h, i], [a, h, i], [a, h, i] -> [a, h, g]; "
            "f, i: sum; b, d, e: opaque; c: opaque (sum H)"
        )
    ],
    "program moe_ragged": [
        (
            "[a, b, c], [d, e, c, f], [d, g, f, h], [i, j, k], [d, l], [d, l], [d, l], [i, j, k], [i, j, k] -> "
            "[i, j, h]; d, f, k: sum; g: gather; a: opaque (sum D); b, e, l: opaque; c: opaque (sum H)"
        )
    ],
    "program layers": [
        (
            "[a, b, c], [a, b, d], [a, b, e], [c, d], [d, e] -> [c, d], [d, e]; "
            "a: opaque (sum total2, sum total1); b: opaque (sum g2, sum g1); e: opaque (sum d1)"
        )
    ],
    "rotary": ["[a, bc], [a, d|d], [a, d|d] -> [a, b, d|d]; c: opaque"],
    "in place": ["[a, b], [a, b], [b] -> [a, b]"],
    "append": ["[a|b|c, d], [b, d] -> [a|b|c, d], [d]; a, b, c: opaque (sum total)"],
    "stencil": ["[a(-2:1), b] -> [a, b]; a: halo"],
    "scan": ["[., a], [., a] -> [., a]"],
    "outer sum": ["[a] -> [a, a], [.]; a: opaque"],
    "overwritten": ["[ab] -> [cb]; a: opaque"],
    "scaled sums": ["[a, b], [a], [a] -> [a], [a], [a, b]; b: sum; c: opaque (sum U)"],
    "biased in place": ["[a, b], [a] -> [a]; b: opaque (sum Y)"],
    "accumulated": ["[a, b], [a] -> [a]; b: opaque (other Y)"],
    "joined sum": ["[a, b], [a, c] -> [a]; b, c: opaque (sum total)"],
    "started elsewhere": ["[a, b], [a] -> [a]; b: opaque (other Y)"],
    "grouped rows": ["[ab, c] -> [a, c], [.]; a, b, c: opaque"],
    "with predicate": ["[a, b] -> [a, b]"],
    "transposed scatter": ["[a], [a, b], [b, c] -> [b, c]; a, c: opaque"],
}
"""The rules of each operator's functions, of the package's programs, and of others."""

TRUE_OF_THE_DATA = {"program moe_ragged": ["a as if sums followed"]}
"""What no rule may claim, and is right for the inputs that are drawn: a row is of one device, its other terms zeros."""


@functools.cache
def judges(name: str) -> list[Judge]:
    """The functions of `name`, each compiled once."""
    if name in OPERATORS:
        return [Judge(func) for func in legalized(name)]
    if name in FUNCTIONS:
        return [Judge(FUNCTIONS[name])]
    found = program(name.removeprefix("program "))
    return [Judge(found.func, found.inputs)]


def test_each_function_has_its_rule_here():
    assert list(RULES) == [*OPERATORS, *(f"program {name}" for name in PROGRAMS), *FUNCTIONS]


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    assert [str(judge.run.rule) for judge in judges(name)] == RULES[name]


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_claims_is_right(name):
    """With 2, 3 and 4 devices; where they don't divide a factor its blocks are uneven."""
    for judge in judges(name):
        tried = claims(judge.run.rule, np.random.default_rng(0))
        assert [(claim.label, wrong) for claim in tried if (wrong := judge.wrong(claim))] == []


@pytest.mark.parametrize("name", RULES)
def test_what_is_false_is_seen_to_be(name):
    for judge in judges(name):
        unseen = [claim.label for claim in false_claims(judge.run.rule) if not judge.wrong(claim)]
        assert [label.rpartition(": ")[2] for label in unseen] == TRUE_OF_THE_DATA.get(name, [])


def test_how_much_is_tried():
    rules = [judge.run.rule for name in RULES for judge in judges(name)]
    assert sum(len(list(claims(rule, np.random.default_rng(0)))) for rule in rules) > 1000
    assert sum(len(list(false_claims(rule))) for rule in rules) > 450


# ---- What the rule is made of, each left out: the claims are seen to be wrong


def _without_stores(monkeypatch):
    monkeypatch.setattr(axes.Axes, "_check_stores", lambda self, stored: None)


def _without_diagonals(monkeypatch):
    monkeypatch.setattr(deriving, "_repeated", lambda operand: set())


def _without_parts(monkeypatch):
    monkeypatch.setattr(deriving, "_in_all_parts", lambda number, operands: True)


def _without_others(monkeypatch):
    monkeypatch.setattr(partials, "_follows", lambda block, partial, combiner: True)


def _without_a_second_pass(monkeypatch):
    monkeypatch.setattr(shifts, "_reaches", lambda blocks, group, axes, *_: dict.fromkeys(axes, (-1, 1)))


@pytest.mark.parametrize(
    ("func", "leave_out"),
    [
        (overwritten, _without_stores),
        (outer_sum, _without_diagonals),
        (joined_sum, _without_parts),
        (biased_in_place, _without_others),
        (stencil, _without_a_second_pass),
    ],
)
def test_a_rule_that_is_wrong_is_seen_to_be(func, leave_out, monkeypatch):
    judge = Judge(func)
    leave_out(monkeypatch)
    rule = sharding_rule(func)
    assert rule != judge.run.rule
    assert any(judge.wrong(claim) for claim in claims(rule, np.random.default_rng(0)))


# ---- What a rule holds


def test_factors_of_a_sum():
    rule = sharding_rule(FUNCTIONS["scaled sums"])
    assert rule["a"] == Factor("a", 6, "spatial")
    assert rule["b"] == Factor("b", 8, "reduction", "sum", partial=(0,))  # the second and third output are as ever
    assert rule["c"].stages == ("sum U",)
    assert [operand.name for operand in rule.outputs] == ["linear", "shifted", "doubled"]
    assert [str(block) for block in rule.blocks] == ["[a, b]", "[a]", "[a, c]", "[a]", "[a, b]"]


def test_halo_of_two_passes():
    """What the first pass computes is needed one row around, so that it runs there, too."""
    rule = sharding_rule(stencil)
    assert rule.inputs[0].dims[0] == (Part(0, 12, ("a",), (-2, 1)),)
    assert rule.outputs[0].dims[0] == (Part(0, 12, ("a",)),)
    assert [(block.name, str(block)) for block in rule.blocks] == [("first", "[a(-1:1), b]"), ("second", "[a, b]")]


def test_a_parameter_given_and_left_is_in_both():
    rule = sharding_rule(FUNCTIONS["in place"])
    assert rule.inputs[0] == rule.outputs[0] and rule.inputs[0].name == "W"
    assert rule.inputs[0].shape == (6, 8) and rule.inputs[0].factors == {"a", "b"}


def test_schedules_keep_the_rule():
    (func,) = legalized("matmul, batched")
    sch = s_tir.Schedule(func)
    b, i, j, k = sch.get_loops(sch.get_sblock("matmul"))
    sch.reorder(*sch.split(i, [None, 4]), *sch.split(k, [2, None]), j, b)  # 6 rows in fours: with a predicate
    assert str(sharding_rule(sch.mod["main"])) == RULES["matmul, batched"][0]


@pytest.mark.parametrize("extent", [100, 4096])
def test_offsets_that_cut_everything(extent):
    """A scan cuts its axis at every index; the rule says nothing of it, at no cost."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((extent, 8), "float32"), Y: T.Buffer((extent, 8), "float32")):
        for i, j in T.grid(extent, 8):
            with T.sblock("scan"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] + T.if_then_else(vi > 0, Y[vi - 1, vj], T.float32(0))

    rule = sharding_rule(func)
    assert {factor.kind for factor in rule.factors if factor.extent == extent} == {"opaque"}
    assert rule.inputs[0].dims[1] == rule.outputs[0].dims[1] and rule[rule.outputs[0].dims[1][0].factors[0]].extent == 8


# ---- What can't be analysed


@T.prim_func(s_tir=True)
def calls_by_address(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("call"):
            vi = T.axis.spatial(8, i)
            Y[vi] = T.call_pure_extern("float32", "read", T.address_of(X[vi]))


@T.prim_func(s_tir=True)
def says_where(X: T.Buffer((8,), "float32"), flags: T.Buffer((8,), "int32"), Y: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("some"):
            T.where(flags[i] > 0)
            vi = T.axis.spatial(8, i)
            Y[vi] = X[vi]


@T.prim_func(s_tir=True)
def branches(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")):
    for i in range(8):
        if i < 4:
            with T.sblock("half"):
                vi = T.axis.spatial(8, i)
                Y[vi] = X[vi]


@pytest.mark.parametrize(
    ("func", "reason"),
    [
        (calls_by_address, "block 'call' calls"),
        (says_where, "block 'some' runs where an element says so"),
        (branches, "IfThenElse outside of a block"),
    ],
)
def test_what_is_not_analysed_is_whole(func, reason):
    rule = sharding_rule(func)
    assert not rule.factors and reason in rule.reason
    assert re.fullmatch(r"(\[\.\](, )?)+ -> \[\.\]; .*", str(rule))


def test_symbolic_shapes_are_refused():
    @T.prim_func(s_tir=True)
    def func(x: T.handle, y: T.handle):
        n = T.int32()
        X = T.match_buffer(x, (n,), "float32")
        Y = T.match_buffer(y, (n,), "float32")
        for i in range(n):
            with T.sblock("y"):
                vi = T.axis.spatial(n, i)
                Y[vi] = X[vi]

    with pytest.raises(InputError, match=r"must be constant"):
        sharding_rule(func)

"""Every table of a role has an entry for each node that the role may meet: a new node is missed here first."""

from typing import get_args

import pytest

from tvm_axe.tile import checks, races
from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import Branch, Fill, Gemm, Loop, Node, Signal, Statement, Wait
from tvm_axe.tile.targets.cuda.fragments import emit, infer, scratch
from tvm_axe.tile.targets.cuda.specialized import consumer, obstacles, one_thread, ordering, schedule, steps
from tvm_axe.tile.targets.cuda.uniform import emit as uniform
from tvm_axe.tile.targets.cuda.uniform import hazards, memory
from tvm_axe.tile.targets.llvm.emit import _NODES as CPU

FLAGS = {Wait, Signal}

TABLES = {
    "checks": (checks._RULES, set()),
    "races": (races._NODES, set()),
    "cpu": (CPU, set()),
    "fragments: emit": (emit.NODES, {Branch, Gemm, Loop, *FLAGS}),  # the models' own
    "fragments: infer": (infer.NODES, set()),
    "fragments: scratch": (scratch.NODES, set()),
    "uniform: emit": (uniform._NODES, set()),
    "uniform: hazards": (hazards._NODES, set()),
    "uniform: accesses": (memory._ACCESSES, {Branch, Loop}),  # of leaves
    "specialized: obstacles": (obstacles._STEERING, set()),
    "specialized: ordering": (ordering._NODES, set()),
    "specialized: schedule": (schedule._NODES, FLAGS),  # the producer's and the storing warp's
    "specialized: roles of one thread": (one_thread._SHARED, set()),
}
"""By role, with the nodes that it never meets."""


@pytest.mark.parametrize("role", TABLES)
def test_every_node_has_an_entry(role):
    table, never = TABLES[role]
    assert table.types == set(get_args(Node)) - never


def test_every_step_has_an_entry():
    assert consumer._STEPS.types == steps._BODIES.types == set(get_args(steps.Step))


def test_every_node_says_what_it_touches():
    for node in get_args(Node):
        assert issubclass(node, Statement) and hasattr(node, "__str__")
        assert {"reads", "writes"} <= {*dir(node), *node.__dataclass_fields__}


def test_what_has_no_entry():
    table = TypeTable("code for nobody", {Fill: str, Gemm: str})
    with pytest.raises(TypeError, match="code for nobody: no entry for int; there are entries for Fill, Gemm"):
        table.of(3)

"""The questions that the rules ask: what comes first, what is masked, what loops cover; and a schedule put back."""

import pytest
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import covers
from tvm_axe.analysis.tree import BlockTree, is_one_of
from tvm_axe.schedule import query


def test_precedes_and_one_of(schedule):
    tree = query.tree(schedule())
    mm, epi = tree.named("mm"), tree.named("epi")
    assert tree.precedes(mm, epi) and not tree.precedes(epi, mm)
    assert is_one_of(epi, [mm, epi]) and not is_one_of(epi, [mm])


def test_mask(schedule):
    sch = schedule(5, 3, 8)
    mm = sch.get_sblock("mm")
    assert query.nest_of(sch, mm).mask is None
    sch.split(sch.get_loops(mm)[0], [2, None])
    assert str(query.nest_of(sch, mm).mask) == "i_0 * 3 + i_1 < 5"


def test_questions_leave_no_trace(schedule):
    sch = schedule()
    mm, before = sch.get_sblock("mm"), len(sch.trace.insts)
    assert not query.bound_loops(sch, mm, 0) and query.name_of(sch, mm) == "mm"
    assert [str(nest.block.name_hint) for nest in query.tree(sch).consumers(query.nest_of(sch, mm))] == ["epi"]
    assert len(sch.trace.insts) == before


def test_producers_and_consumers_are_upstreams(schedule):
    """Of a small program, and of one whose buffers are written twice."""

    @T.prim_func(s_tir=True)
    def twice(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("first"):
                vi = T.axis.spatial(4, i)
                B[vi] = A[vi]
        for i in range(4):
            with T.sblock("reader"):
                vi = T.axis.spatial(4, i)
                C[vi] = B[vi]
        for i in range(4):
            with T.sblock("again"):
                vi = T.axis.spatial(4, i)
                B[vi] = T.float32(1)
        for i in range(4):
            with T.sblock("last"):
                vi = T.axis.spatial(4, i)
                C[vi] = C[vi] + B[vi]

    for func in (twice, schedule(4, 4, 4).mod["main"]):
        sch = s_tir.Schedule(func)
        tree = BlockTree(sch.mod)
        for block in sch.get_child_blocks(sch.get_sblock("root")):
            nest = tree.at(sch.get(block))
            assert list(nest.loops) == [sch.get(loop) for loop in sch.get_loops(block)]
            for ours, theirs in (
                (tree.producers(nest), sch.get_producers(block)),
                (tree.consumers(nest), sch.get_consumers(block)),
            ):
                assert {str(other.block.name_hint) for other in ours} == {query.name_of(sch, rv) for rv in theirs}


def test_refused_after_a_change(schedule):
    """State, trace and handles are those before the primitive; handles that were held go on to work."""
    sch = schedule()
    mm = sch.get_sblock("mm")
    loop = sch.get_loops(mm)[0]
    script, trace = sch.mod.script(), str(sch.trace)

    @query.all_or_nothing
    def splits_and_raises(sch):
        sch.split(loop, [2, None])
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        splits_and_raises(sch)
    assert sch.mod.script() == script and str(sch.trace) == trace
    outer, _ = sch.split(loop, [2, None])
    assert sch.get(sch.get_loops(mm)[0]).same_as(sch.get(outer))


def covered(transform, extents=(6, 4)):
    """Whether the loops of a copy take it through all of its domain after `transform(sch, block)`."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer(extents, "float32"), B: T.Buffer(extents, "float32")):
        for i, j in T.grid(*extents):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj]

    sch = s_tir.Schedule(program)
    block = sch.get_sblock("b")
    transform(sch, block)
    return covers(_tvm.block_realize(sch, block), [sch.get(loop) for loop in sch.get_loops(block)])


WHOLE = {
    "as it is": lambda sch, block: None,
    "split": lambda sch, block: sch.split(sch.get_loops(block)[0], [3, None]),
    "split with a tail": lambda sch, block: sch.split(sch.get_loops(block)[0], [4, None]),
    "split twice": lambda sch, block: sch.split(sch.split(sch.get_loops(block)[0], [4, None])[1], [None, 3]),
    "both split": lambda sch, block: [sch.split(loop, [4, None]) for loop in sch.get_loops(block)],
    "fused": lambda sch, block: sch.fuse(*sch.get_loops(block)),
}


@pytest.mark.parametrize("extents", [(6, 4), (5, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_transformed_loops_cover_a_block(name, extents):
    """A mask that cuts only what is beyond an extent is none."""
    assert covered(WHOLE[name], extents)


PARTS = {
    "masked": ((6, 6), lambda i, j: i < 5, lambda i: i),
    "masked by both": ((6, 6), lambda i, j: i + j < 5, lambda i: i),
    "some of the rows": ((5, 6), lambda i, j: i < 6, lambda i: i),
    "every other row": ((3, 6), lambda i, j: i < 6, lambda i: i * 2),
    "from the second row": ((5, 6), lambda i, j: i < 6, lambda i: i + 1),
}


@pytest.mark.parametrize("name", PARTS)
def test_part_of_a_block(name):
    (rows, columns), mask, binding = PARTS[name]

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((6, 6), "float32"), B: T.Buffer((6, 6), "float32")):
        for i, j in T.grid(rows, columns):
            with T.sblock("b"):
                vi = T.axis.spatial(6, binding(i))
                vj = T.axis.spatial(6, j)
                T.where(mask(i, j))
                B[vi, vj] = A[vi, vj]

    sch = s_tir.Schedule(program)
    block = sch.get_sblock("b")
    loops = [sch.get(loop) for loop in sch.get_loops(block)]
    assert not covers(_tvm.block_realize(sch, block), loops)

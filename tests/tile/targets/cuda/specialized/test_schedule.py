"""When consumers wait: the steps made of a program."""

import programs_hopper as programs
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.tile.targets.cuda.specialized import buffers
from tvm_axe.tile.targets.cuda.specialized.schedule import schedule
from tvm_axe.tile.targets.cuda.specialized.steps import Await, Choose, Given, Guard, Issue, PingPong, Release, Repeat


def scheduled(func, slots=2, turns=True):
    program = tile.read(func)
    found = buffers.find(program)
    assert not isinstance(found, str), found
    return schedule(program, {buffer: slots if buffer.loop else 1 for buffer in found}, turns)


def lines(steps):
    return [line for step in steps for line in str(step).splitlines()]


def test_a_product_is_waited_for_an_iteration_later():
    made = scheduled(programs.matmul(512, 512, 512))
    assert lines(made.steps)[:-1] == [
        "for l from 0, 8 times:",
        "  acquire a, b",
        "  issue c += a @ b.T, which adds if l != 0",
        "  wait until 1 in flight",
        "  release a, b, 1 behind if l != 0",
        "wait until 0 in flight",
        "release a, b",
    ]
    assert [str(fill.dst) for fill, _ in made.folded] == ["c"]


def test_one_slot_is_released_before_the_next_is_taken():
    made = scheduled(programs.matmul(512, 512, 512), slots=1)
    (loop,) = (step for step in made.steps if isinstance(step, Repeat))
    assert lines(loop.body)[:2] == ["wait until 0 in flight", "release a, b if l != 0"]


def test_attention_defers_its_second_product_and_takes_turns():
    made = scheduled(programs.attention(1, 1, 512))
    (first,) = (step for step in made.steps if isinstance(step, Given))
    (loop,) = (step for step in made.steps if isinstance(step, Repeat))
    kinds = [type(step).__name__ for step in loop.body if not isinstance(step, Release)]
    assert kinds[:8] == ["Acquire", "PingPong", "Issue", "Acquire", "Issue", "PingPong", "Do", "Await"]
    scores, output = (step for step in loop.body if isinstance(step, Issue))
    assert (scores.gemm.c.tile.name, output.gemm.c.tile.name) == ("s", "o")
    waits = [step.pending for step in loop.body if isinstance(step, Await)]
    assert waits == [1, 0]
    assert [step.gemm.c.tile.name for step in first.body if isinstance(step, Issue)] == ["s"]
    after = made.steps[made.steps.index(loop) + 1 :]
    assert [step.gemm.c.tile.name for step in after if isinstance(step, Issue)] == ["o"]


def test_one_warpgroup_takes_no_turns():
    made = scheduled(programs.attention(1, 1, 512), turns=False)
    (loop,) = (step for step in made.steps if isinstance(step, Repeat))
    assert made.deferred and not [step for step in loop.body if isinstance(step, PingPong)]


def test_without_a_second_slot_nothing_is_deferred():
    made = scheduled(programs.attention(1, 1, 512), slots=1)
    assert not made.deferred
    (loop,) = (step for step in made.steps if isinstance(step, Repeat))
    assert loop.start == 0


def test_a_loop_that_may_not_run_keeps_its_fill_and_releases_only_what_it_took():
    made = scheduled(programs.batched(2, 128, 64, 256))
    assert not made.folded
    (loop,) = (step for step in made.steps if isinstance(step, Repeat))
    assert lines(loop.behind) == ["wait until 0 in flight", "release a, w"]  # in the arm alone in which it ran
    assert not any(line.startswith(("wait", "release")) for line in lines(made.steps[made.steps.index(loop) + 1 :]))


def test_behind_a_branch_a_product_sets_what_was_cleared_for_the_other_way():
    @T.prim_func
    def func(A: T.Buffer((128, 64), "float16"), flag: T.Buffer((1,), "int32"), C: T.Buffer((128, 64), "float32")):
        with tile.kernel(1):
            a = tile.shared((128, 64), "float16")
            b = tile.shared((64, 64), "float16")
            c = tile.fragment((128, 64), "float32")
            tile.fill(c, 0)
            if flag[0] > 0:
                tile.copy(A[0, 0], a)
                tile.copy(A[0:64, 0:64], b)
                tile.gemm(a, b, c)
            tile.copy(c, C[0, 0])

    made = scheduled(func)
    assert lines(made.steps)[0] == "fill c with T.float32(0.0)" and not made.folded
    assert "  issue c += a @ b, which sets" in lines(made.steps)


def test_shared_memory_that_threads_write_is_synchronized_for_products():
    made = lines(scheduled(programs.through_shared(128, 128, 256)).steps)
    written = made.index("copy first to staged")
    read = made.index("issue second = staged @ d.T, which sets")
    assert "synchronize consumers and the tensor cores" in made[written:read]


def test_a_branch_waits_for_what_either_arm_touches():
    @T.prim_func
    def func(A: T.Buffer((128, 64), "float16"), flag: T.Buffer((1,), "int32"), C: T.Buffer((128, 64), "float32")):
        with tile.kernel(1):
            a = tile.shared((128, 64), "float16")
            b = tile.shared((64, 64), "float16")
            c = tile.fragment((128, 64), "float32")
            tile.copy(A[0, 0], a)
            tile.copy(A[0:64, 0:64], b)
            tile.gemm(a, b, c, transpose_b=True, accumulate=False)
            if flag[0] > 0:
                with tile.parallel(128, 64) as (x, y):
                    c[x, y] = c[x, y] * T.float32(2)
            tile.copy(c, C[0, 0])

    made = lines(scheduled(func).steps)
    branch = next(i for i, line in enumerate(made) if line.startswith("if "))
    assert made.index("wait until 0 in flight") < branch


def test_rings_hold_what_is_loaded_and_read_together():
    found = buffers.find(tile.read(programs.attention(1, 1, 512)))
    assert [buffer.name for buffer in found] == ["q", "k", "v"]
    assert [buffer.loop is None for buffer in found] == [True, False, False]
    (both,) = buffers.find(tile.read(programs.matmul(256, 256, 256)))
    assert both.name == "a, b" and both.bytes == (128 + 256) * 64 * 2


def test_a_tile_loaded_twice_is_no_ring():
    @T.prim_func
    def func(A: T.Buffer((128, 64), "float16"), C: T.Buffer((64, 64), "float32")):
        with tile.kernel(1):
            a = tile.shared((64, 64), "float16")
            c = tile.fragment((64, 64), "float32")
            tile.copy(A[0, 0], a)
            tile.gemm(a, a, c, transpose_b=True, accumulate=False)
            tile.copy(A[64, 0], a)
            tile.gemm(a, a, c, transpose_b=True)
            tile.copy(c, C[0, 0])

    assert "a is written in 2 places" in buffers.find(tile.read(func))


def test_a_deferred_product_sets_its_accumulator_the_first_time():
    made = scheduled(programs.chained(128, 192))
    (loop,) = (step for step in made.steps if isinstance(step, Repeat))
    (inside,) = (step for step in loop.body if isinstance(step, Issue) and step.gemm.c.tile.name == "o")
    (after,) = (step for step in made.steps if isinstance(step, Issue) and step.gemm.c.tile.name == "o")
    assert str(inside.accumulate) == "j != 1" and bool(after.accumulate)
    once = scheduled(programs.chained(128, 64))
    (last,) = (step for step in once.steps if isinstance(step, Issue) and step.gemm.c.tile.name == "o")
    assert not bool(last.accumulate)


def test_a_product_of_a_loop_that_may_not_run_is_deferred_where_it_runs():
    """All of it is under one condition, and nothing is in flight behind."""
    made = scheduled(programs.listed(0))
    assert made.deferred and not made.folded
    (guard,) = (step for step in made.steps if isinstance(step, Guard))
    assert [type(step).__name__ for step in guard.body] == ["Given", "Repeat", "Acquire", "Issue", "Await", "Release"]
    assert lines((guard,))[0] == "if counts[0] > 0:"
    assert not any(isinstance(step, Issue | Await) for step in made.steps)


def test_products_under_a_branch_are_done_at_its_end():
    made = scheduled(programs.chained(128, 192, branch=True))
    assert not made.deferred
    (loop,) = (step for step in made.steps if isinstance(step, Repeat))
    (choice,) = (step for step in loop.body if isinstance(step, Choose))
    assert [type(step).__name__ for step in choice.then] == ["Issue", "Await"] and not choice.otherwise
    released = [line.strip() for line in lines(loop.body) if "release v" in line]
    assert released == ["release v"]


def test_products_are_not_carried_past_a_branch_over_accumulators():
    """The assembler would let each product end before the next begins."""

    def func(branches):
        @T.prim_func
        def func(
            A: T.Buffer((64, 512), "float16"), B: T.Buffer((512, 64), "float16"), C: T.Buffer((64, 64), "float32")
        ):
            with tile.kernel(1):
                a = tile.shared((64, 64), "float16")
                b = tile.shared((64, 64), "float16")
                s = tile.fragment((64, 64), "float32")
                p = tile.fragment((64, 64), "float16")
                c = tile.fragment((64, 64), "float32")
                tile.fill(c, 0)
                for l in tile.pipelined(8):
                    tile.copy(A[0, l * 64], a)
                    tile.copy(B[l * 64, 0], b)
                    tile.gemm(a, b, s, accumulate=False)
                    if branches:  # noqa: SIM102
                        if l > 5:
                            tile.fill(s, 0)
                    tile.copy(s, p)
                    tile.gemm(p, b, c)
                tile.copy(c, C[0, 0])

        return func

    for branches in (False, True):
        made = scheduled(func(branches), turns=False)
        (loop,) = (step for step in made.steps if isinstance(step, Repeat))
        assert isinstance(loop.body[-1], Issue) != branches
        assert any(isinstance(step, Release) and step.when is not None for step in loop.body) != branches

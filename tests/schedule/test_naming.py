"""Block names stay unique after every primitive, and each leads to its block; traces replay without them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tvm_ffi
from tvm import s_tir
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.schedule.naming import block_names

SCRIPTS = Path(__file__).parents[2] / "scripts"


@T.prim_func(s_tir=True)
def block(A: T.Buffer((8, 16), "float32"), W: T.Buffer((16, 8), "float32"), out: T.Buffer((8, 8), "float32")):
    C = T.sblock_alloc_buffer((8, 8), "float32")
    for i, j, k in T.grid(8, 8, 16):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(8, 8):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj], T.float32(0))


def check(sch: axe.Schedule) -> None:
    """No name twice, each name its block's, and a plain schedule that replays the trace."""
    names = block_names(sch.mod)
    assert len(set(names)) == len(names), names
    probe = sch.copy()
    for name in names:
        assert str(probe.get(probe.get_sblock(name)).name_hint) == name
    assert tvm_ffi.structural_equal(probe.mod, sch.mod)
    replayed = s_tir.Schedule(sch.origin, debug_mask=sch.state.debug_mask)
    probe.trace.apply_to_schedule(replayed, remove_postproc=False)
    assert tvm_ffi.structural_equal(replayed.mod, sch.mod)  # which looks at no names


def twice_rfactored(sch: axe.Schedule) -> None:
    for factor in (4, 2):
        outer, _ = sch.split(sch.get_loops(sch.get_sblock("mm"))[2], [factor, None])
        sch.rfactor(outer, 0)


def cached(sch: axe.Schedule) -> None:
    sch.cache_write(sch.get_sblock("mm"), 0, "local")
    sch.cache_read(sch.get_sblock("epi"), 0, "local")


def gathered(sch: axe.Schedule) -> None:
    sch.shard("mm", "k", "tp")
    sch.split_collective("mm")
    sch.cache_read(sch.get_sblock("epi"), 0, "global")


def nested(sch: axe.Schedule) -> None:
    twice_rfactored(sch)
    for name in ("mm_rf", "mm_rf_1"):
        sch.blockize(sch.get_loops(sch.get_sblock(name))[2])


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (twice_rfactored, ["mm_rf", "mm_rf_1", "mm", "epi"]),
        (cached, ["mm", "C_local", "C_local_1", "epi"]),
        (gathered, ["mm_rf", "mm", "C_global", "C_global_1", "epi"]),
        (
            nested,
            ["mm_rf", "mm_rf_o", "mm_rf_1", "mm_rf_1_o", "mm", "epi"],
        ),
    ],
)
def test_what_upstream_names_alike_is_told_apart(make: Callable[[axe.Schedule], None], names: list[str]) -> None:
    sch = axe.Schedule(block, mesh={"tp": 2})
    make(sch)
    assert block_names(sch.mod) == names
    check(sch)


def test_names_and_handles_are_of_the_same_blocks() -> None:
    sch = axe.Schedule(block, mesh={"tp": 2})
    written = sch.cache_write(sch.get_sblock("mm"), 0, "local")
    read = sch.cache_read(sch.get_sblock("epi"), 0, "local")
    assert [str(sch.get(rv).name_hint) for rv in (written, read)] == ["C_local", "C_local_1"]
    sch.compute_inline(written)
    # The name stays that block's, also where it is the only one of upstream's name, and in copies.
    copied = sch.copy()
    assert copied.get(copied.get_sblock("C_local_1")).same_as(copied.get(read))
    with pytest.raises(axe.AxeError, match=r"'C_local' is no block of the function \(did you mean 'C_local_1'"):
        sch.shard("C_local", "ax0", "tp")
    check(sch)


def test_a_name_that_is_free_again_is_a_new_blocks() -> None:
    sch = axe.Schedule(block, mesh={"tp": 2})
    cached(sch)
    sch.compute_inline(sch.get_sblock("C_local"))
    again = sch.cache_write(sch.get_sblock("mm"), 0, "local")
    assert str(sch.get(again).name_hint) not in ("mm", "C_local_1", "epi")
    check(sch)


@pytest.fixture(scope="module")
def fuzz() -> Iterator[SimpleNamespace]:
    import fuzz_actions
    import fuzz_scheduling

    yield SimpleNamespace(actions=fuzz_actions, scheduling=fuzz_scheduling)


@pytest.mark.parametrize("seeds", [range(first, first + 15) for first in range(0, 60, 15)], ids=str)
def test_names_stay_unique_in_random_schedules(fuzz: SimpleNamespace, seeds: range) -> None:
    for seed in seeds:
        case, _, _ = fuzz.scheduling.draw_case(seed)
        sch = case.schedule()
        for action in case.actions:
            fuzz.actions.apply(sch, action)
            names = block_names(sch.mod)
            assert len(set(names)) == len(names), (seed, str(action), names)
        check(sch)

"""What has no order, found when a program is read: elements and flags that blocks and devices share."""

from __future__ import annotations

import re

import pytest
from generator_mesh import MISTAKES, drawn
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.tile import clocks


def refused(func: tirx.PrimFunc, *words: str) -> None:
    with pytest.raises(TileError, match=".*".join(map(re.escape, words))):
        tile.read(func)


@pytest.mark.parametrize("devices", [3, 4])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_random_mistakes_are_refused(mistake: str, devices: int) -> None:
    for seed in range(30):
        with pytest.raises(TileError):
            tile.read(drawn(seed, devices, mistake).func)


def ring(credits: bool = True, early: bool = False, slots: int = 2, turns: bool = True) -> tirx.PrimFunc:
    """Four rows, each handed on to the next device through a few slots."""

    @T.prim_func
    def ring(
        x: T.Buffer((4, 64), "float32"),
        me: T.int32,
        to: tile.mesh_tensor((2, slots, 64), "float32"),
        full: tile.mesh_tensor((2, slots), "int32"),
        free: tile.mesh_tensor((2, slots), "int32"),
        y: T.Buffer((4, 64), "float32"),
    ):
        with tile.kernel(1, device=me):
            part = tile.fragment((1, 64), "float32")
            for t in range(4):
                if credits and t >= slots:
                    tile.wait(free[me, t % slots], t // slots)
                tile.copy(x[t, 0], part)
                tile.copy(part, to[1 - me, t % slots, 0])
                tile.signal(full[1 - me, t % slots], t // slots + 1)
                tile.wait(full[me, t % slots], t // slots + 1 if turns else 1)
                if early:
                    tile.signal(free[1 - me, t % slots], t // slots + 1)
                tile.copy(to[me, t % slots, 0], part)
                if not early:
                    tile.signal(free[1 - me, t % slots], t // slots + 1)
                tile.copy(part, y[t, 0])

    return ring


def test_a_slot_given_back_while_it_is_read() -> None:
    """With two slots the next row says that this one was read, whatever is given back."""
    tile.read(ring())
    tile.read(ring(slots=1))
    tile.read(ring(early=True))
    refused(ring(early=True, slots=1), "to[", "is stored to", "is loaded from", "in no order")


def test_a_slot_that_nobody_gives_back() -> None:
    refused(ring(credits=False, slots=1), "to[", "in no order")


def test_a_flag_without_a_turn() -> None:
    """Its second setting isn't waited for, as it still has the value of the first."""
    refused(ring(turns=False), "to[", "is stored to", "is loaded from", "in no order")


def test_a_flag_that_two_set() -> None:
    @T.prim_func
    def twice(
        x: T.Buffer((4, 64), "float32"),
        me: T.int32,
        to: tile.mesh_tensor((2, 2, 4, 64), "float32"),
        told: tile.mesh_tensor((2, 1), "int32"),
        y: T.Buffer((4, 64), "float32"),
    ):
        with tile.kernel(1, device=me):
            part = tile.fragment((4, 64), "float32")
            tile.copy(x, part)
            for d in range(2):
                tile.copy(part, to[(me + d) % 2, me, 0, 0])
                tile.signal(told[(me + d) % 2, 0])
            tile.wait(told[me, 0])
            tile.copy(to[me, me, 0, 0], part)
            tile.copy(part, y)

    refused(twice, "told[", "is set", "it is set by", "add=True for flags that count")


def gathered(ordered: bool) -> tirx.PrimFunc:
    """Rows that a kernel before has left in peers' slabs, once all have begun, or behind a wait for the own device."""

    @T.prim_func
    def gathered(
        me: T.int32,
        rows: tile.mesh_tensor((2, 4, 64), "float32"),
        begun: tile.mesh_tensor((2, 2), "int32"),
        y: T.Buffer((2, 4, 64), "float32"),
    ):
        with tile.kernel(1, device=me):
            part = tile.fragment((4, 64), "float32")
            for d in range(2):
                tile.signal(begun[d, me], ordered=False)
            if ordered:
                tile.wait(begun[me, 0:2])
            else:
                tile.wait(begun[me, me])
            for d in range(2):
                tile.copy(rows[d, 0, 0], part)
                tile.copy(part, y[d, 0, 0])

    return gathered


def test_what_a_kernel_before_left_on_another_device() -> None:
    tile.read(gathered(True))
    refused(gathered(False), "rows", "on device 1", "no wait says that this has ended")


def test_elements_and_not_boxes_meet() -> None:
    """Every second element each: boxes overlap, and no element is shared."""

    def rows(first: int) -> tirx.PrimFunc:
        @T.prim_func
        def rows(
            me: T.int32,
            to: tile.mesh_tensor((2, 64), "float32"),
            told: tile.mesh_tensor((2, 2), "int32"),
            y: T.Buffer((64,), "float32"),
        ):
            with tile.kernel(1, device=me):
                with tile.parallel(16) as i:
                    to[1 - me, i * 4 + me] = 1.0
                with tile.parallel(16) as i:
                    to[me, i * 4 + first - me] = 2.0
                for d in range(2):
                    tile.signal(told[d, me])
                tile.wait(told[me, 0:2])
                with tile.parallel(64) as i:
                    y[i] = to[me, i]

        return rows

    tile.read(rows(3))
    refused(rows(1), "to[0, 1] is stored to", "is stored to")


def test_blocks_of_one_device() -> None:
    """A partial sum that a block takes from the one before, which has told it, or another one."""

    def summed(back: int) -> tirx.PrimFunc:
        @T.prim_func
        def summed(
            x: T.Buffer((4, 64), "float32"),
            parts: T.Buffer((4, 64), "float32"),
            told: T.Buffer((4,), "int32"),
            y: T.Buffer((4, 64), "float32"),
        ):
            with tile.kernel(4) as i:
                part = tile.fragment((1, 64), "float32")
                tile.copy(x[i, 0], part)
                tile.copy(part, parts[i, 0])
                tile.signal(told[i])
                if i > 0:
                    tile.wait(told[i - 1])
                    tile.copy(parts[T.max(i - back, 0), 0], part)
                tile.copy(part, y[i, 0])

        return summed

    assert clocks.check_order(tile.read(summed(1))) == "all 4 blocks are in order"
    refused(summed(2), "parts[0, 0] is loaded from", "is stored to")


def test_what_data_decides_is_left_out() -> None:
    @T.prim_func
    def sent(
        x: T.Buffer((4, 64), "float32"),
        owner: T.Buffer((4,), "int32"),
        me: T.int32,
        to: tile.mesh_tensor((2, 2, 4, 64), "float32"),
        told: tile.mesh_tensor((2, 2), "int32"),
        y: T.Buffer((2, 4, 64), "float32"),
    ):
        with tile.kernel(1, device=me):
            part = tile.fragment((1, 64), "float32")
            for r in range(4):
                tile.copy(x[r, 0], part)
                tile.copy(part, to[owner[r], me, r, 0])
            for d in range(2):
                tile.signal(told[d, me])
            tile.wait(told[me, 0:2])
            for d in range(2):
                for r in range(4):
                    tile.copy(to[me, d, r, 0], part)
                    tile.copy(part, y[d, r, 0])

    assert tile.explain(sent, "llvm").splitlines()[-2:] == [
        "flags",
        "    all 2 blocks are in order, but for what data decides",
    ]


def test_what_others_set_orders_anything() -> None:
    @T.prim_func
    def taken(parts: T.Buffer((4, 64), "float32"), arrived: T.Buffer((4,), "int32"), y: T.Buffer((4, 64), "float32")):
        with tile.kernel(4) as i:
            part = tile.fragment((1, 64), "float32")
            tile.wait(arrived[i])
            tile.copy(parts[i, 0], part)
            tile.copy(part, y[i, 0])

    assert clocks.check_order(tile.read(taken)) == "not judged: others than the program set arrived"


def test_of_very_many_blocks_some_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that meet the first and the last, and as many more as a budget of steps allows."""
    ran = []
    run = clocks._Run.run
    monkeypatch.setattr(clocks._Run, "run", lambda self, lanes: (ran.append(len(lanes)), run(self, lanes)))

    def swapped(blocks: int, wrong: int) -> tirx.PrimFunc:
        @T.prim_func
        def swapped(
            me: T.int32,
            to: tile.mesh_tensor((2, blocks, 64), "float32"),
            told: tile.mesh_tensor((2, blocks), "int32"),
            y: T.Buffer((blocks, 64), "float32"),
        ):
            with tile.kernel(blocks, device=me) as i:
                part = tile.fragment((1, 64), "float32")
                tile.fill(part, 1)
                tile.copy(part, to[1 - me, i, 0])
                tile.signal(told[1 - me, i])
                if i != wrong:
                    tile.wait(told[me, i])
                tile.copy(to[me, i, 0], part)
                tile.copy(part, y[i, 0])

        return swapped

    said = clocks.check_order(tile.read(swapped(1000, -1)))
    assert 100 < ran.pop() < 1500
    assert re.fullmatch(r"\d+ of 2000 blocks are in order, until they wait for others", said)
    for wrong in (0, 20, 999):
        refused(swapped(1000, wrong), f"i={wrong}", "in no order")

"""Where tiles lie in a specialized kernel's shared memory: TMA writes aligned, and all is counted."""

import re
from dataclasses import replace

import programs_hopper as programs
import pytest
import tvm
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.instructions import tma
from tvm_axe.tile.targets.cuda.specialized import buffers
from tvm_axe.tile.targets.cuda.specialized import memory as memories
from tvm_axe.tile.targets.cuda.specialized.emit import lower
from tvm_axe.tile.targets.cuda.specialized.obstacles import obstacle
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan

HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})
BYTES = {"half": 2, "float": 4, "uchar": 1, "signed char": 1, "int8_t": 1, "int": 4}

SIZES = [(1, 8, "float16"), (1, 32, "float16"), (1, 40, "float16"), (3, 24, "float16"), (5, 8, "float16")]
SIZES += [(7, 56, "float16"), (8, 16, "float16"), (9, 64, "float16"), (1, 4, "float32"), (1, 20, "float32")]
SIZES += [(13, 12, "float32"), (1, 16, "int8"), (3, 48, "int8"), (264, 64, "float16"), (320, 24, "float16")]


def planned(func):
    made = tile.plan(func, HOPPER)
    assert isinstance(made, SpecializedPlan)
    return made


@pytest.mark.parametrize(("rows", "columns", "dtype"), SIZES)
def test_every_slot_begins_aligned(rows, columns, dtype):
    made = planned(programs.scaled(rows, columns, dtype))
    memory = made.memory
    (small,) = (shared for shared in memory.slots if shared.name == "s")
    assert memory.slots[small] > 1
    stride, swizzled = tma.slot_bytes(small), tma.swizzle(small)
    assert stride % (128, 256, 512, 1024)[swizzled] == 0 and small.bytes <= stride < small.bytes + 128
    layout = tma.shared_layout(small, memory.slots[small])
    starts = [layout.apply(slot, 0, 0, shape=[memory.slots[small], rows, columns]) for slot in range(2)]
    item = tma.item_bytes(dtype)
    assert [int(start["m"]) * item for start in starts] == [0, stride]
    tall = tma.height(small)
    assert rows % tall == 0 and (tall == rows or tall * tma.panel(small) * item % 128 == 0)


def test_heights_of_copies_are_aligned_and_the_tallest():
    for rows in range(1, 600):
        for columns in (8, 16, 24, 32, 40, 64, 128):
            small = Tile(None, "shared", (rows, columns), "float16")
            pitch, unit = 2 * tma.panel(small), tma.alignment(small)
            fine = [tall for tall in range(1, min(rows, 256) + 1) if rows % tall == 0]
            fine = [tall for tall in fine if tall == rows or tall * pitch % unit == 0]
            assert tma.height(small) == max(fine, default=0)


def addresses(text):
    """The byte addresses in shared memory to which TMA loads, for slots and unrolled copies from 0 to 2."""
    found = []
    call = r"bulk_tensor_\w+shared__cluster_global\w*\(\w+\(\(&\(\(\(([\w ]+)\*\)\w+\)\[(.*?)\]\)\)\), \(\(void"
    calls = re.findall(call, text)
    for dtype, index in calls:
        names = sorted(set(re.findall(r"_ptr_\d+\[0\]|\bv_\d+\b", index)))
        for at in range(3):
            code = index
            for name in names:
                code = re.sub(re.escape(name) + r"(?!\d)", str(at), code)
            found.append(eval(code, {}) * BYTES[dtype])
    return found


@pytest.mark.parametrize(("rows", "columns", "dtype"), SIZES[::2])
def test_the_code_loads_to_aligned_addresses(rows, columns, dtype):
    mod = tvm.IRModule({"main": tile.lower(programs.scaled(rows, columns, dtype), HOPPER)})
    text = str(tvm.compile(mod, HOPPER, tir_pipeline="tirx").mod.imports[0].inspect_source())
    found = addresses(text)
    assert len(found) >= 6 and not [address for address in found if address % 128]


@pytest.mark.parametrize(("rows", "columns", "dtype"), [*SIZES, (128, 64, "float16")])
def test_all_of_shared_memory_is_counted(rows, columns, dtype):
    """What the function asks for is what was planned, and the places of tiles don't overlap."""
    made = planned(programs.scaled(rows, columns, dtype))
    text = tile.lower(programs.scaled(rows, columns, dtype), HOPPER).script()
    (asked,) = map(int, re.findall(r"dyn_smem_bytes\": T\.int64\((\d+)\)", text))
    assert asked == made.memory.bytes <= 232448
    shaped = r'decl_buffer\(\(\d+, \d+, \d+\), (?:"(\w+)", )?data=\w+\.data, elem_offset=(\d+)'
    places = sorted(int(at) * tma.item_bytes(kind or "float32") for kind, at in re.findall(shaped, text))
    assert len(places) == 2 and places[0] == made.memory.barriers
    assert places[0] + made.memory.room(next(t for t in made.memory.slots if t.name == "s")) == places[1]


def test_padding_counts_towards_what_a_block_has(monkeypatch):
    """Slots of 16 bytes take 128 each: without the padding, more would seem to fit."""
    made = planned(programs.scaled(1, 8, steps=8, stages=8))
    (small,) = (shared for shared in made.memory.slots if shared.name == "s")
    assert made.memory.room(small) == 8 * 128 and small.bytes == 16
    monkeypatch.setattr(memories.tma, "slot_bytes", lambda shared: shared.bytes if shared.bytes > 16 else 1 << 20)
    with pytest.raises(TileError, match=r"s: 1048576 bytes x 8"):
        tile.plan(programs.scaled(1, 8, steps=8, stages=8), HOPPER)


def test_rows_that_no_aligned_copy_divides_are_not_loaded_by_tma():
    text = obstacle(tile.read(programs.scaled(257, 24)), HOPPER)
    assert (
        text is not None
        and "257 rows of s are more than 256, and no number of them that divides 257 takes a multiple of 128" in text
    )


def test_barriers_beyond_1024_bytes_take_more_room():
    made = planned(programs.scaled(1, 32))
    memory = replace(made.memory, buffers=dict.fromkeys(made.memory.buffers, 33))
    assert (made.memory.barriers, memory.barriers) == (1024, 2048)
    text = lower(replace(made, memory=memory)).script()
    offsets = [int(at) * 8 for at in re.findall(r'"uint64", data=\w+\.data, elem_offset=(\d+)', text)]
    assert 1024 < max(offsets) + 33 * 8 <= memory.barriers


def test_small_tiles_share_the_barriers_of_what_is_read_around_them():
    """Sums of rows are read between products of what they are loaded beside; scales are read behind theirs."""
    heads = {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 256, "keys": 256, "dim": 128, "dtype": "bfloat16"}
    backward = KERNELS["attention_backward"].recipe(HOPPER, heads, passes=1).programs[1]
    assert [buffer.name for buffer in buffers.find(backward)] == ["k, v", "q, top", "do, d"]
    blocks = KERNELS["block_scaled_matmul"]
    (scaled,) = blocks.recipe(HOPPER, blocks.cases[0]).programs
    assert "a, b" in [buffer.name for buffer in buffers.find(scaled)]


@pytest.mark.parametrize(("rows", "blocks", "filled"), [(1, 1, {"a": 1}), (60, 1, {"a": 60}), (64, 1, {}), (70, 2, {})])
def test_rows_that_no_tensor_has_are_not_loaded(rows, blocks, filled):
    """Of tiles that hold all of a tensor; B has 40 rows of 64."""
    made = planned(programs.few_rows(rows, blocks))
    assert {shared.name: count for shared, count in made.memory.filled.items()} == {"b": 40, **filled}
    loaded = [made.memory.loaded(buffer) for buffer in made.memory.buffers]
    assert sum(loaded) == (filled.get("a", 64) + 40) * 64 * 2
    assert "40 rows, and zeros from the beginning" in made.explain()
    text = tile.lower(programs.few_rows(rows, blocks), HOPPER).script()
    assert all(f"T.uint32({size})" in text for size in loaded)


def test_rows_of_tiles_without_such_rows_are_all_loaded():
    made = planned(programs.matmul(128, 256, 64))
    (buffer,) = made.memory.buffers
    assert not made.memory.filled and made.memory.loaded(buffer) == buffer.bytes

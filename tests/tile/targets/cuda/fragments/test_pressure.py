"""Registers of fragments that are needed at once: counted, refused where they don't fit, and as they are assembled."""

import itertools
import random
import re
import shutil
import subprocess

import programs_hopper
import pytest
import tvm
from programs_accumulators import in_turn, summed, two
from tvm import tirx
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import nvcc
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.fragments import pressure
from tvm_axe.tile.targets.cuda.fragments.pressure import Again, Either, Use, find_peak
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan

HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})
AMPERE = Target({"kind": "cuda", "arch": "sm_80"})

# ---- Counted -----------------------------------------------------------------------------------------------------

TILES = [Tile(tirx.Var(name, "handle"), "fragment", (1,), "float32") for name in "abcdef"]
COUNTS = dict(zip(TILES, (1, 2, 4, 8, 16, 32)))


def drawn(draw, depth=2):
    """A few statements, all of whose tiles are kept."""
    found = []
    for number in range(draw.randint(1, 4)):
        kind = draw.random()
        if depth and kind < 0.2:
            found.append(Again(drawn(draw, depth - 1)))
        elif depth and kind < 0.3:
            found.append(Either((drawn(draw, depth - 1), drawn(draw, depth - 1))))
        else:
            reads, writes = (frozenset(draw.sample(TILES, draw.randint(0, 2))) for _ in range(2))
            sets = frozenset(of for of in writes if draw.random() < 0.7) - reads
            found.append(Use(str(number), reads, writes, sets, frozenset(TILES), draw.random() < 0.5))
    return tuple(found)


def unrolled(uses, draw):
    """The statements on one way through loops and branches."""
    for use in uses:
        if isinstance(use, Either):
            yield from unrolled(draw.choice(use.arms), draw)
        elif isinstance(use, Again):
            for _ in range(draw.randint(0, 3)):
                yield from unrolled(use.body, draw)
        else:
            yield use


def held_at_once(trace):
    """The most registers, by the definition: a value is needed if it is read later, before it is set, and was written.

    Of all statements before, behind and at which a tile may be needed.
    """
    most = 0

    def needed(tile, at):
        for use in trace[at:]:
            if tile in use.reads:
                return True
            if tile in use.sets:
                return False
        return False

    for at, use in enumerate(trace):
        written = frozenset().union(*(before.writes for before in trace[:at]))
        before = {tile for tile in TILES if needed(tile, at) and tile in written}
        behind = {tile for tile in TILES if needed(tile, at + 1) and tile in written} | use.writes
        for live in (before, behind | (before if use.together else set())):
            most = max(most, sum(COUNTS[tile] for tile in live))
    return most


@pytest.mark.parametrize("seed", range(5))
def test_the_peak_is_that_of_every_way_through_the_program(seed):
    draw = random.Random(seed)
    exact = 0
    for _ in range(60):
        uses = drawn(draw)
        found = find_peak(uses, COUNTS).registers
        seen = [held_at_once(list(unrolled(uses, draw))) for _ in range(40)]
        assert max(seen) <= found
        exact += max(seen) == found
    assert exact >= 40  # the others need a way that wasn't drawn, or two at once


def test_what_threads_can_compute_again_does_not_count():
    a, b = TILES[:2]
    uses = (Use("a", writes=frozenset({a}), sets=frozenset({a})), Use("b", frozenset({a}), frozenset({b})))
    assert find_peak(uses, COUNTS).registers == 0
    kept = (uses[0], Again((Use("b", frozenset({a}), frozenset({b})),)))
    assert find_peak(kept, COUNTS).held == ((a, 1),)


# ---- Refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "fits", "too_wide"),
    [(64, (64, 128, 192, 224), (256,)), (128, (64, 128, 192), (208, 224, 256)), (192, (64, 128), (144, 160, 192))],
)
def test_accumulators_of_specialized_kernels_fit_together(rows, fits, too_wide):
    for columns in fits:
        made = tile.plan(two(rows, columns), HOPPER)
        assert isinstance(made, SpecializedPlan)
        assert f"registers: {columns} for fragments" in made.explain()
    for columns in too_wide:
        with pytest.raises(TileError, match=rf"take {columns} registers .* c {columns // 2}, e {columns // 2}; valid"):
            tile.plan(two(rows, columns, threads=2 * rows), HOPPER)


@pytest.mark.parametrize(("rows", "threads", "fits", "too_wide"), [(64, 128, 208, 256), (128, 512, 192, 256)])
@pytest.mark.parametrize("instruction", ["mma", "fma"])
def test_accumulators_of_uniform_kernels_fit_together(rows, threads, fits, too_wide, instruction):
    dtype = "float32" if instruction == "fma" else "float16"
    options = {"dtype": dtype, "instruction": instruction, "roles": "uniform", "threads": threads}
    fits = 192 if instruction == "fma" else fits
    for target in (HOPPER, AMPERE):
        tile.plan(two(rows, fits, **options), target)
        with pytest.raises(TileError, match=r"at once.*c \d+, e \d+; valid are smaller tiles, more threads, or one"):
            tile.plan(two(rows, too_wide, **options), target)


def test_a_refusal_names_fragments_with_registers_and_remedies():
    with pytest.raises(
        TileError,
        match=r"fragments take 256 registers of each of 128 threads at once, by `.*`, and there are 229 for them: "
        r"c 128, e 128; valid are smaller tiles, rows for more warpgroups, of 64 each and up to 3, or one fragment for "
        r"what is never needed at once",
    ):
        tile.plan(two(64, 256, threads=128), HOPPER)


def test_where_columns_are_shared_more_fits():
    """Two warpgroups have the registers of two, where nobody says how many there are."""
    made = tile.plan(two(64, 256), HOPPER)
    assert isinstance(made, SpecializedPlan) and made.across == 2
    assert "registers: 128 for fragments" in made.explain()


def test_sums_of_threads_around_a_loop_count():
    tile.plan(summed(64, 192, threads=128), AMPERE)
    with pytest.raises(TileError, match=r"take 256 registers .*c 128, e 128"):
        tile.plan(summed(64, 256, threads=128), AMPERE)


@pytest.mark.parametrize("options", [{}, {"roles": "uniform", "threads": 128}])
def test_one_after_the_other_they_fit(options):
    made = tile.plan(in_turn(64, 256, **options), HOPPER)
    assert "registers: 128 for fragments" in made.explain()


def test_a_product_in_flight_keeps_its_operand():
    """Attention holds o, s and p while the product of p and v runs beside that of q and k."""
    made = tile.plan(programs_hopper.attention(1, 1, 1024), HOPPER)
    (text,) = re.findall(r"registers: (\d+) for fragments", made.explain())
    assert 64 + 64 + 32 <= int(text) <= 64 + 64 + 32 + 8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head", [64, 128, 256])
def test_attention_fits(head, causal):
    tile.plan(programs_hopper.attention(2, 3, 1024, head, causal=causal), HOPPER)


# ---- As the assembler has it -------------------------------------------------------------------------------------


def test_what_is_refused_spills_and_what_is_not_does_not(tmp_path, monkeypatch):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    fine = [two(64, 224), two(128, 192)]
    refused = [two(64, 256, threads=128), two(192, 144)]
    for func in refused:
        with pytest.raises(TileError, match="at once"):
            tile.plan(func, HOPPER)
    monkeypatch.setattr(pressure, "check", lambda *_: None)
    named = {f"fine_{at}": func for at, func in enumerate(fine)} | {f"no_{at}": f for at, f in enumerate(refused)}
    mod = {name: tile.lower(func, HOPPER).with_attr("global_symbol", name) for name, func in named.items()}
    code = tmp_path / "kernels.cu"
    built = tvm.compile(tvm.IRModule(mod), HOPPER, tir_pipeline="tirx")
    code.write_text(str(built.mod.imports[0].inspect_source()))
    generate = "-gencode=arch=compute_90a,code=sm_90a"
    command = ["nvcc", *nvcc._FLAGS, generate, "-Xptxas", "-v", "-o", tmp_path / "kernels.cubin", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pairs = itertools.pairwise(line for line in done.stderr.splitlines() if "properties for" in line or "spill" in line)
    spilled = {
        re.search(r"properties for (\w+)_kernel", head)[1]: int(re.search(r"(\d+) bytes spill stores", line)[1])
        for head, line in pairs
        if "properties for" in head
    }
    assert spilled.keys() == named.keys()
    assert all((spilled[name] > 0) == name.startswith("no_") for name in named), spilled

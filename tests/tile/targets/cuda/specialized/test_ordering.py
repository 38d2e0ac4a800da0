"""`wait` and `signal` in the specialized model: who waits, stores and signals, what is refused, and the code."""

import re
import shutil
import subprocess

import programs_flags as programs
import programs_hopper
import pytest
import tvm
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import nvcc
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan
from tvm_axe.tile.targets.cuda.uniform.plan import UniformPlan

HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})
PROGRAMS = [
    programs.product_scatter(4, 1024, 512, 256),
    programs.product_scatter(2, 512, 512, 256, epilogue_tile=(32, 64)),
    programs.product_scatter(2, 512, 512, 256, persistent=False),
    programs.product_send(4, 1024, 512, 1024),
    programs.gather_product(4, 1024, 512, 256),
]


def source(func):
    mod = tvm.IRModule({"main": tile.lower(func, HOPPER).with_attr("global_symbol", "main")})
    return str(tvm.compile(mod, HOPPER, tir_pipeline="tirx").mod.imports[0].inspect_source())


def kernel(func):
    text = source(func)
    return text[text.rindex("__global__") :]


def refused(func, message):
    with pytest.raises(TileError, match=message):
        tile.plan(func, HOPPER)


@pytest.mark.parametrize("func", PROGRAMS)
def test_programs_are_specialized(func):
    assert isinstance(tile.plan(func, HOPPER), SpecializedPlan)


def test_decisions_are_said():
    text = tile.explain(programs.product_scatter(2, 512, 512, 256, epilogue_tile=(32, 64)), HOPPER)
    for part in (
        "a producer warp, a storing warp and 2 warpgroups that consume",
        "stored by the storing warp in pieces of (32, 64)",
        "i, j] >= 1, then reset: by the producer  (before the loads behind it)",
        "signal flags[owner, me, i, j] = 1: by the storing warp  (once its stores have arrived)",
    ):
        assert part in text, text
    assert "from its end" not in text  # order="given", although the last tiles are the longest
    assert "storing warp" not in tile.explain(programs.gather_product(2, 512, 512, 256), HOPPER)


def test_both_arms_fill_one_ring():
    plan = tile.plan(programs.product_scatter(2, 512, 512, 256), HOPPER)
    (buffer,) = plan.memory.buffers
    assert [copy.src.tile.name for copy in buffer.copies] == ["A", "B"]
    assert [copy.src.tile.name for copy in buffer.others] == ["unit", "arrived"]


def test_the_code_of_the_roles():
    text = kernel(programs.product_scatter(2, 512, 512, 256))
    assert text.count("axe_wait(") == text.count("axe_proxy(") == text.count("axe_signal(") == 1
    code = text[text.index("{") :]
    assert code.index("axe_wait(") < code.index("axe_proxy(") < code.index("unit_tensormap")
    storing = code[: code.index("axe_signal(")]
    assert storing.rindex("async_bulk_wait_group_0") > storing.rindex("parts_tensormap")
    plain = kernel(programs_hopper.matmul(512, 512, 512, (128, 256, 64)))
    for instruction in ("wgmma_wait_group_wait_group_sync_aligned_1", "wgmma_wait_group_wait_group_sync_aligned_0"):
        assert text.count(instruction) == plain.count(instruction) == 1  # products stay in flight over the branches
    waiting = kernel(programs.gather_product(2, 512, 512, 256))
    assert "axe_wait(" in waiting and "axe_signal" not in waiting


def test_they_become_cubins_without_spills(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    mod = tvm.IRModule(
        {
            f"program_{at}": tile.lower(f, HOPPER).with_attr("global_symbol", f"program_{at}")
            for at, f in enumerate(PROGRAMS)
        }
    )
    code = tmp_path / "kernels.cu"
    code.write_text(str(tvm.compile(mod, HOPPER, tir_pipeline="tirx").mod.imports[0].inspect_source()))
    generate = "-gencode=arch=compute_90a,code=sm_90a"
    command = ["nvcc", *nvcc._FLAGS, generate, "-Xptxas", "-v", "-o", tmp_path / "kernels.cubin", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spills = [line for line in done.stderr.splitlines() if "bytes spill stores" in line]
    assert len(spills) >= len(PROGRAMS)
    assert all(" 0 bytes spill stores, 0 bytes spill loads" in line for line in spills), spills
    assert "serialized" not in done.stderr, done.stderr


# ---- What flags order ------------------------------------------------------------------------------------------------


def product(name, roles=None, dtype="bfloat16", epilogue_tile=None):
    """A product with one `wait` or `signal`, named by what is around it."""

    @T.prim_func
    def func(
        A: T.Buffer((256, 256), "bfloat16"),
        B: T.Buffer((256, 256), "bfloat16"),
        bias: T.Buffer((256,), "float32"),
        lengths: T.Buffer((4,), "int32"),
        flags: T.Buffer((2,), "int32"),
        told: T.Buffer((2, 4), "int32"),
        C: T.Buffer((256, 256), dtype),
        D: T.Buffer((256, 256), "float32"),
    ):
        with tile.kernel(2, roles=roles, epilogue_tile=epilogue_tile) as i:
            a = tile.shared((128, 64), "bfloat16")
            b = tile.shared((64, 256), "bfloat16")
            c = tile.fragment((128, 256), "float32")
            row = tile.fragment((256,), "float32")
            at = tile.local((1,), "int32")
            tile.fill(c, 0)
            if name == "a wait before loads":
                tile.wait(flags[i])
            if name == "a read before the wait":
                tile.copy(bias, row)
                tile.wait(flags[i])
            if name == "a copy behind the wait" or name == "points behind the wait":
                tile.wait(flags[i])
            if name == "a bound behind the wait":
                tile.wait(flags[i])
            if name == "a store behind the wait":
                tile.wait(flags[i])
                tile.copy(c, C[i * 128, 0])
            if name == "a wait for shared":
                at[0] = i
                tile.wait(flags[at[0]])
            if name == "a signal before stores":
                tile.signal(told[i, 0])
            for k in tile.pipelined(T.min(lengths[i], 4) if name == "a bound behind the wait" else 4):
                if name == "a read in an iteration before":
                    tile.copy(bias, row)
                tile.copy(A[i * 128, k * 64], a)
                tile.copy(B[k * 64, 0], b)
                tile.gemm(a, b, c)
                if name == "a read in an iteration before":
                    tile.wait(flags[i])
            if name == "a copy behind the wait":
                tile.copy(bias, row)
            if name == "points behind the wait":
                with tile.parallel(128, 256) as (x, y):
                    c[x, y] = c[x, y] + bias[y]
            if name == "a wait for the room":
                tile.wait(flags[i])
            if name == "a direct store":
                tile.copy(c, D[i * 128, 0])
            if name == "points that store":
                with tile.parallel(128, 256) as (x, y):
                    D[i * 128 + x, y] = c[x, y]
            if name == "an atomic store":
                tile.copy(c, D[i * 128, 0], atomic="add")
            if name == "a signal in one arm":
                if i == 0:
                    tile.copy(c, C[0, 0])
                    tile.signal(told[0, 0])
                else:
                    tile.copy(c, C[128, 0])
            elif name == "a store in one arm":
                if i == 0:
                    tile.copy(c, C[0, 0])
                tile.signal(told[i, 0])
            elif name != "a store behind the wait":
                tile.copy(c, C[i * 128, 0])
            if name in ("a signal behind", "a direct store", "points that store", "an atomic store"):
                tile.signal(told[i, 0])
            if name == "a read behind the store":
                tile.copy(bias, row)
                tile.signal(told[i, 0])
            if name == "a load behind the store":
                x2 = tile.shared((128, 64), "bfloat16")
                y2 = tile.shared((64, 256), "bfloat16")
                tile.copy(A[i * 128, 0], x2)
                tile.copy(B[0, 0], y2)
                tile.gemm(x2, y2, c, accumulate=False)
                tile.signal(told[i, 0])
            if name == "all flags":
                tile.signal(told[i, 0:4], add=True)
            if name == "a direct store behind":
                tile.signal(told[i, 0])
                tile.copy(c, D[i * 128, 0])
            if name == "at once":
                tile.copy(c, D[i * 128, 0])
                tile.signal(told[i, 0], ordered=False)

    return func


@pytest.mark.parametrize(
    "name",
    [
        "a wait before loads",
        "a read before the wait",
        "a wait for shared",
        "a signal behind",
        "a signal in one arm",
        "a direct store behind",
        "all flags",
        "at once",
    ],
)
def test_ordered(name):
    assert isinstance(tile.plan(product(name), HOPPER), SpecializedPlan)
    assert ("axe_wait(" in kernel(product(name))) == ("wait" in name)


READ = r"wait for flags\[i\] >= 1: the producer waits, and `.*`, behind it, reads global {}.* as consumers, which don't"
STORED = "signal .*: the storing warp signals, and `{}.*`, before it, is stored to global {}.* by consumers"


@pytest.mark.parametrize(
    "name, message",
    [
        ("a copy behind the wait", READ.format("bias")),
        ("points behind the wait", READ.format("bias")),
        ("a bound behind the wait", READ.format("lengths")),
        ("a read in an iteration before", READ.format("bias")),
        ("a store behind the wait", "behind it without a load in between, stores to global C"),
        ("a wait for the room", "behind it without a load in between, stores to global C"),
        ("a direct store", STORED.format("copy c", "D")),
        ("points that store", STORED.format("parallel 128 x 256", "D")),
        ("an atomic store", STORED.format("copy c", "D")),
        ("a signal before stores", "the storing warp signals, and has stored nothing before for certain"),
        (
            "a read behind the store",
            "the storing warp signals, and `copy bias.*`, before it, may not have been done by then",
        ),
        (
            "a load behind the store",
            "the storing warp signals, and `copy A.*`, before it, may not have been done by then",
        ),
        ("a store in one arm", "the storing warp signals, and has stored nothing before for certain"),
    ],
)
def test_not_ordered(name, message):
    asked = product(name, roles="specialized")
    refused(asked, message)
    refused(asked, "valid in a specialized kernel .* or roles='uniform'")
    assert isinstance(tile.plan(product(name, roles="uniform"), HOPPER), UniformPlan)
    left_open = tile.plan(product(name), HOPPER)
    assert isinstance(left_open, UniformPlan)
    (why,) = (decision.reason for decision in left_open.decisions if decision.subject == "roles")
    assert re.search(message, why) and "valid" not in why


def test_a_store_that_is_not_staged():
    refused(product("a signal behind", dtype="float32", roles="specialized"), STORED.format("copy c", "C"))


@pytest.mark.parametrize("epilogue_tile", [(32, 32), (24, 64), (4, 64), (128, 64), (32, 256)])
def test_pieces_that_do_not_divide(epilogue_tile):
    tile.plan(product("a signal behind", epilogue_tile=(32, 64)), HOPPER)
    refused(
        product("a signal behind", epilogue_tile=epilogue_tile),
        "valid are 64 columns, a swizzled row, and rows in multiples of 8",
    )


def test_pieces_of_nothing():
    refused(
        product("", dtype="float32", epilogue_tile=(32, 64)),
        "epilogue_tile=.*, but no tile leaves through shared memory",
    )
    text = tile.explain(product("", epilogue_tile=(32, 64), roles="uniform"), HOPPER)
    assert "epilogue_tile: no pieces  (only a specialized kernel has a storing warp)" in text


# ---- Circular buffers of two sources ---------------------------------------------------------------------------------


def two_sources(name):
    @T.prim_func
    def func(
        A: T.Buffer((128, 512), "bfloat16"),
        B: T.Buffer((512, 256), "bfloat16"),
        E: T.Buffer((128, 512), "bfloat16"),
        F: T.Buffer((512, 256), "bfloat16"),
        C: T.Buffer((128, 256), "bfloat16"),
    ):
        with tile.kernel(1, 1):
            a = tile.shared((128, 64), "bfloat16")
            b = tile.shared((64, 256), "bfloat16")
            c = tile.fragment((128, 256), "float32")
            half = tile.fragment((128, 64), "bfloat16")
            tile.fill(c, 0)
            tile.fill(half, 0)
            for k in tile.pipelined(8):
                if name == "outside":
                    tile.copy(B[k * 64, 0], b)
                if k < 4:
                    tile.copy(A[0, k * 64], a)
                    if name != "outside":
                        tile.copy(B[k * 64, 0], b)
                elif name == "other order":
                    tile.copy(F[k * 64, 0], b)
                    tile.copy(E[0, k * 64], a)
                elif name == "part":
                    tile.copy(E[0:64, k * 64 : k * 64 + 64], a[0:64, 0:64])
                    tile.copy(E[64:128, k * 64 : k * 64 + 64], a[64:128, 0:64])
                    tile.copy(F[k * 64, 0], b)
                else:
                    tile.copy(E[0, k * 64], a)
                    if name != "outside":
                        tile.copy(F[k * 64, 0], b)
                tile.gemm(a, b, c)
            tile.copy(c, C[0, 0])

    return func


def test_arms_load_in_their_own_orders():
    (buffer,) = tile.plan(two_sources("other order"), HOPPER).memory.buffers
    assert [copy.dst.tile.name for copy in buffer.copies + buffer.others] == ["a", "b", "b", "a"]
    text = kernel(two_sources("other order"))
    loads = text[text.index("{") :]
    assert loads.index("expect_tx_shared") < loads.index("A_tensormap") < loads.index("B_tensormap")
    assert loads.rindex("expect_tx_shared") < loads.index("F_tensormap") < loads.index("E_tensormap")
    assert loads.count("expect_tx_shared") == 2


@pytest.mark.parametrize(
    "name, message",
    [
        ("outside", "b, a are read together, and loaded in different places; a branch loads all of them in each arm"),
        ("part", "a is written in 3 places; a circular buffer is filled in one, or in both arms of an `if`"),
    ],
)
def test_other_fillings_are_uniform(name, message):
    plan = tile.plan(two_sources(name), HOPPER)
    assert isinstance(plan, UniformPlan) and message in plan.explain()


def test_arms_of_different_shapes_are_refused():
    with pytest.raises(
        tvm.error.DiagnosticError, match=r"src has shape \(64, 64\), dst \(128, 64\); they must be equal"
    ):

        @T.prim_func
        def func(A: T.Buffer((128, 512), "bfloat16"), E: T.Buffer((64, 512), "bfloat16"), i: T.int32):
            with tile.kernel(1):
                a = tile.shared((128, 64), "bfloat16")
                if i > 0:
                    tile.copy(A[0, 0], a)
                else:
                    tile.copy(E[0:64, 0:64], a)


def stores_again(rows, own):
    """A product in each iteration, stored by the storing warp, and in the last of them by consumers, too."""
    source = [
        "@T.prim_func",
        "def func(A: T.Buffer((128, 256), 'float16'), B: T.Buffer((64, 256), 'float16'),",
        "         O: T.Buffer((640, 64), 'float16'), F: T.Buffer((1,), 'int32')):",
        "    with tile.kernel(1):",
        "        a = tile.shared((128, 64), 'float16')",
        "        w = tile.shared((64, 64), 'float16')",
        "        c = tile.fragment((128, 64), 'float32')",
        "        for l in range(4):",
        "            tile.copy(A[0, l * 64], a)",
        "            tile.copy(B[0, l * 64], w)",
        "            tile.gemm(a, w, c, transpose_b=True, accumulate=False)",
        f"            tile.copy(c, O[{rows}, 0])",
        "            tile.signal(F[0], l)",
        *([f"        tile.fill(O[{own} : {own} + 128, 0 : 64], 1)"] if own is not None else []),
    ]
    return tvm.script.from_source("\n".join(source), extra_vars={"tile": tile, "T": T})


@pytest.mark.parametrize(("rows", "waits"), [("l * 128", 2), ("0", 3)])
def test_the_storing_warp_stores_to_one_place_in_order(rows, waits):
    """It waits for its stores before each signal and at its end, and else until they have read what they take."""
    text = kernel(stores_again(rows, None))
    assert text.count("bulk_wait_group_async_bulk_wait_group_0()") == waits
    assert text.count("bulk_wait_group_async_bulk_wait_group_read_0()") == 3 - waits


def test_places_that_consumers_and_the_storing_warp_store_to_are_refused():
    assert isinstance(tile.plan(stores_again("l * 128", 512), HOPPER), SpecializedPlan)
    plan = tile.plan(stores_again("l * 128", 384), HOPPER)
    assert not isinstance(plan, SpecializedPlan)
    assert "consumers store to" in plan.explain()

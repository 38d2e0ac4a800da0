"""Knobs: how they are declared and set, what a program is with them, and what is refused."""

import itertools

import numpy as np
import pytest
import tvm
import tvm_ffi
from interpreter import interpret
from tvm.error import DiagnosticError
from tvm.script import tirx as T

from tvm_axe import cli, tile
from tvm_axe.analysis.expressions import variables_of
from tvm_axe.errors import InputError, TileError
from tvm_axe.tile import knobs
from tvm_axe.tile.nodes import Branch, Loop

M, N, K = 50, 40, 72


@T.prim_func
def matmul(A: T.Buffer((M, K), "float32"), B: T.Buffer((K, N), "float32"), C: T.Buffer((M, N), "float32")):
    bm = tile.knob("bm", (16, 32, 64))
    bn = tile.knob("bn", (16, 32), default=32)
    bk = tile.knob("bk", (24, 8))
    whole = tile.knob("whole", (False, True))
    tile.require(bm * bn <= 1024)
    with tile.kernel(tile.cdiv(M, bm), tile.cdiv(N, bn), swizzle=tile.knob("swizzle", (1, 4))) as (m, n):
        half = T.meta_var(bk // 2)
        a = tile.shared((bm, bk), "float32")
        b = tile.shared((bk, bn), "float32")
        c = tile.fragment((bm, bn), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(tile.cdiv(K, bk), stages=tile.knob("stages", (0, 2))):
            tile.copy(A[m * bm, k * bk], a)
            if whole:
                tile.copy(B[k * bk : k * bk + bk, n * bn : n * bn + bn], b)
            else:
                tile.copy(B[k * bk, n * bn], b[0:half, 0:bn])
                tile.copy(B[k * bk + half, n * bn], b[half : 2 * half, 0:bn])
            tile.gemm(a, b, c)
        with tile.parallel(bm, bn) as (i, j):
            c[i, j] = T.max(c[i, j], 0)
        tile.copy(c, C[m * bm, n * bn])


def values(func):
    """Every combination of knobs that a program allows."""
    declared = knobs.declared(func)
    for chosen in itertools.product(*(each.values for each in declared)):
        found = dict(zip((each.name for each in declared), chosen))
        try:
            knobs.check_allowed(func, found)
        except InputError:
            continue
        yield found


def test_declared():
    assert [str(each) for each in knobs.declared(matmul)] == [
        "bm of 16, 32, 64",
        "bn of 16, 32",
        "bk of 24, 8",
        "whole of 0, 1",
        "swizzle of 1, 4",
        "stages of 0, 2",
    ]
    assert [each.default for each in knobs.declared(matmul)] == [16, 32, 24, 0, 1, 0]


def test_a_program_with_knobs_prints_and_parses_back():
    parsed = tvm.script.from_source(matmul.script())
    assert tvm_ffi.structural_equal(parsed, matmul)
    assert knobs.declared(parsed) == knobs.declared(matmul)


def test_what_a_program_is_without_values():
    program = tile.read(matmul)
    assert [(str(setting), setting.reason) for setting in program.knobs][:2] == [
        ("bm = 16", "the default"),
        ("bn = 32", "the default"),
    ]
    assert [tile_.shape for tile_ in program.tiles] == [(16, 24), (24, 32), (16, 32)]
    assert [extent for _, extent in program.grid] == [4, 2]
    assert program.options == {"swizzle": 1}
    assert "    knob bm = 16" in str(program).splitlines()
    assert not any(isinstance(node, Branch) for node in program.nodes())


def test_what_a_program_is_with_values():
    program = tile.read(matmul, {"bm": 32, "bk": 8, "stages": 2, "swizzle": 4})
    assert [tile_.shape for tile_ in program.tiles] == [(32, 8), (8, 32), (32, 32)]
    assert [setting.value for setting in program.knobs] == [32, 32, 8, 0, 4, 2]
    assert {setting.reason for setting in program.knobs if setting.knob.name != "bn"} == {"set", "the default"}
    assert program.options == {"swizzle": 4}
    (loop,) = (node for node in program.nodes() if isinstance(node, Loop))
    assert (loop.extent, loop.stages) == (9, 2)


def test_no_knob_is_left_in_what_is_read():
    names = {each.name for each in knobs.declared(matmul)}
    for found in values(matmul):
        func = tile.read(matmul, found).func
        assert names.isdisjoint(str(var.name) for var in variables_of(func.body))
        assert knobs.declared(func) == ()


def test_all_values_compute_the_same():
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype("float32") for shape in ((M, K), (K, N)))
    want = np.maximum(a @ b, 0)
    combinations = list(values(matmul))
    assert len(combinations) == (3 * 2 - 1) * 2 * 2 * 2 * 2
    for number, found in enumerate(combinations):
        program = tile.read(matmul, found)
        c = np.full((M, N), np.nan, "float32")
        if number % 7 == 0:
            np.testing.assert_array_equal(interpret(program, a, b, c)[2], want)
        if number % 5 == 0:
            tile.compile(program, "llvm")(a, b, c)
            np.testing.assert_array_equal(c, want)


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
def test_gpus_plan_and_emit_each_value(target):
    for found in itertools.islice(values(matmul), 0, None, 11):
        decided = tile.plan(tile.read(matmul, found), target)
        assert f"bm = {found['bm']}  (set; bm of 16, 32, 64)" in decided.explain()
        assert decided.program.knobs
        tile.lower(decided.program, target)


def test_the_executable_says_what_its_knobs_are_and_why():
    exe = tile.compile(matmul, "llvm", knobs={"bm": 32})
    assert exe.knobs == {"bm": 32, "bn": 32, "bk": 24, "whole": 0, "swizzle": 1, "stages": 0}
    lines = exe.explain().splitlines()
    assert lines[:3] == [
        "knobs",
        "    bm = 32  (set; bm of 16, 32, 64)",
        "    bn = 32  (the default; bn of 16, 32)",
    ]
    assert tile.compile(matmul, "llvm", work_dir=None).knobs["bm"] == 16


@pytest.mark.parametrize(
    "given, message",
    [
        ({"block": 3}, r"matmul: no knob 'block'; there are: bm of 16, 32, 64; bn of 16, 32; bk of 24, 8; whole"),
        ({"bm": 17}, "matmul: bm is 17; valid are 16, 32, 64"),
        ({"bm": 64}, r"matmul: tile.require\(bm \* bn <= 1024\) doesn't hold of bm=64, bn=32, bk=24, whole=0"),
    ],
)
def test_values_refused(given, message):
    with pytest.raises(InputError, match=message):
        tile.read(matmul, given)
    with pytest.raises(InputError, match=message):
        tile.compile(matmul, knobs=given)


def test_knobs_of_a_program_without_any():
    @T.prim_func
    def plain(A: T.Buffer((8,), "float32")):
        with tile.kernel(1):
            a = tile.fragment((8,), "float32")
            tile.fill(a, 0)
            tile.copy(a, A[0])

    with pytest.raises(InputError, match="plain: no knobs can be set, bm neither: it declares none"):
        tile.compile(plain, knobs={"bm": 1})
    with pytest.raises(InputError, match="no knobs can be set, bm neither: it was read"):
        tile.compile(tile.read(matmul), knobs={"bm": 16})
    assert tile.compile(plain, knobs={}).knobs == {}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (((),), r"knob bm: values \(\); valid are different integers"),
        (((1.5, 2),), "valid are different integers of 32 bits"),
        (((1, 1),), "valid are different integers of 32 bits"),
        (((1, 1 << 31),), "valid are different integers of 32 bits"),
        (((1, 2), 3), "knob bm: default 3; valid is one of 1, 2"),
    ],
)
def test_declarations_refused(arguments, message):
    allowed, *default = arguments
    with pytest.raises(TileError, match=message):
        tile.knob("bm", allowed, **({"default": default[0]} if default else {}))


def test_what_a_requirement_is_of():
    with pytest.raises(TileError, match="require: takes a condition on knobs"):
        tile.require(3)

    @T.prim_func
    def data(A: T.Buffer((8,), "int32"), n: T.int32):
        block = tile.knob("block", (4, 8))
        tile.require(block < n)
        with tile.kernel(1):
            a = tile.fragment((8,), "int32")
            tile.fill(a, 0)
            tile.copy(a, A[0])

    with pytest.raises(InputError, match=r"data: tile.require\(block < n\) is about more than knobs; there are: block"):
        tile.read(data)


def test_a_requirement_of_numbers_alone():
    @T.prim_func
    def numbers(A: T.Buffer((8,), "int32")):
        tile.require(8 <= 8)
        with tile.kernel(1):
            a = tile.fragment((8,), "int32")
            tile.fill(a, 0)
            tile.copy(a, A[0])

    assert tile.read(numbers).knobs == ()


def test_two_of_one_name():
    @T.prim_func
    def twice(A: T.Buffer((8,), "int32")):
        one = tile.knob("block", (4, 8))
        other = tile.knob("block", (2, 4))
        with tile.kernel(one):
            a = tile.fragment((other,), "int32")
            tile.fill(a, 0)
            tile.copy(a, A[0])

    with pytest.raises(TileError, match="knobs have names of their own, got block, block"):
        tile.read(twice)


def test_a_name_of_a_number_is_meta_var():
    @T.prim_func
    def scalar(A: T.Buffer((8,), "float32")):
        block = tile.knob("block", (4, 8))
        with tile.kernel(1):
            half = block // 2
            a = tile.fragment((half,), "float32")
            tile.fill(a, 0)
            tile.copy(a, A[0])

    with pytest.raises(TileError, match=r"tile a: extents are positive constants, got .*T.meta_var\(number\)"):
        tile.read(scalar)


def test_both_sides_of_a_copy_have_the_same_knobs():
    def copying(extent):
        @T.prim_func
        def func(A: T.Buffer((64, 64), "float32")):
            block = tile.knob("block", (16, 32))
            with tile.kernel(1):
                a = tile.shared((block, 64), "float32")
                tile.copy(A[0:extent, 0:64], a)
                tile.copy(a, A[0, 0])

        return func

    with pytest.raises(DiagnosticError, match=r"src has shape \(32, 64\), dst \(block, 64\); they must be equal"):
        copying(32)


def test_options_are_checked_once_knobs_are_numbers():
    @T.prim_func
    def options(A: T.Buffer((128,), "float32")):
        threads = tile.knob("threads", (128, 0))
        with tile.kernel(1, threads=threads, persistent=tile.knob("persistent", (False, True))):
            a = tile.fragment((128,), "float32")
            tile.fill(a, 0)
            tile.copy(a, A[0])

    assert tile.read(options, {"persistent": True}).options == {"threads": 128, "persistent": 1}
    with pytest.raises(TileError, match="kernel: threads must be positive, got 0"):
        tile.read(options, {"threads": 0})


def test_a_branch_that_is_never_taken_leaves_nothing():
    @T.prim_func
    def sometimes(A: T.Buffer((64,), "float32")):
        more = tile.knob("more", (0, 1))
        with tile.kernel(1):
            a = tile.fragment((64,), "float32")
            tile.fill(a, 0)
            for _ in range(4):
                if more == 1:
                    extra = tile.fragment((64,), "float32")
                    tile.fill(extra, 1)
                    tile.copy(extra, a)
            with tile.parallel(64) as i:
                if more == 1:
                    a[i] = a[i] + T.float32(1)
            tile.copy(a, A[0])

    assert [str(tile_.name) for tile_ in tile.read(sometimes).tiles] == ["a"]
    assert [type(node).__name__ for node in tile.read(sometimes).body] == ["Fill", "Copy"]
    for more in (0, 1):
        array = np.full(64, np.nan, "float32")
        tile.compile(sometimes, knobs={"more": more})(array)
        assert (array == 2 * more).all()


def test_the_command_sets_knobs(tmp_path, capsys):
    (tmp_path / "programs.py").write_text(
        "from tvm.script import tirx as T\n"
        "from tvm_axe import tile\n\n\n"
        "@T.prim_func\n"
        'def zeros(A: T.Buffer((64,), "float32")):\n'
        '    block = tile.knob("block", (16, 32))\n'
        "    with tile.kernel(tile.cdiv(64, block)) as i:\n"
        '        a = tile.fragment((block,), "float32")\n'
        "        tile.fill(a, 0)\n"
        "        tile.copy(a, A[i * block])\n"
    )
    spec = f"{tmp_path / 'programs.py'}:zeros"
    assert cli.main(["tile", "explain", spec, "--knob", "block=32"]) == 0
    said = capsys.readouterr().out
    assert "kernel zeros(A) for i < 2" in said and "block = 32  (set; block of 16, 32)" in said
    assert cli.main(["tile", "explain", spec, "--knob", "block=3"]) == 2
    assert "zeros: block is 3; valid are 16, 32" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["tile", "explain", spec, "--knob", "block"])
    assert "'block' isn't a knob and its value, such as bm=128" in capsys.readouterr().err


def test_the_parser_points_at_a_declaration():
    def declaring():
        @T.prim_func
        def func(A: T.Buffer((8,), "float32")):
            block = tile.knob("block", (4, 4))
            with tile.kernel(block):
                a = tile.fragment((8,), "float32")
                tile.fill(a, 0)
                tile.copy(a, A[0])

        return func

    with pytest.raises(DiagnosticError):
        declaring()

"""What kernels and recipes refuse, the defaults by shape, and the judge of results."""

import itertools
import math
import re

import numpy as np
import pytest
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import InputError, TileError
from tvm_axe.tile.kernels import KERNELS, Expected, Recipe, lists_of_queries, matmul_for
from tvm_axe.tile.kernels.attention import _cut_blocks
from tvm_axe.tile.kernels.check import judged, poison
from tvm_axe.tile.kernels.kernel import described, only_used

CPU = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})


def double(extent, name="double"):
    @T.prim_func
    def func(X: T.Buffer((extent,), "float32"), unused: T.Buffer((3,), "float32"), Y: T.Buffer((extent,), "float32")):
        with tile.kernel(1) as i:
            x = tile.fragment((extent,), "float32")
            tile.copy(X[i], x)
            with tile.parallel(extent) as j:
                x[j] = x[j] + x[j]
            tile.copy(x, Y[i])

    return func.with_attr("global_symbol", name)


def test_tensors_of_a_recipe():
    recipe = Recipe((tile.read(double(8)), tile.read(double(8, "again"))), ("X",), ("Y",))
    assert recipe.tensors == {"X": ((8,), "float32"), "unused": ((3,), "float32"), "Y": ((8,), "float32")}
    assert recipe.scratch == {"unused": ((3,), "float32")}
    assert recipe.arguments == (("X", "unused", "Y"),) * 2


def test_only_used_parameters_stay():
    assert Recipe((only_used(double(8)),), ("X",), ("Y",)).arguments == (("X", "Y"),)


@pytest.mark.parametrize(
    "programs, inputs, message",
    [
        ((double(8), double(8)), ("X",), "names of their own, got double, double"),
        ((double(8), double(9, "other")), ("X",), r"X is \(\(9,\), 'float32'\) in other and \(\(8,\), 'float32'\)"),
        ((double(8),), ("X", "Z"), "no program has a parameter Z; there are"),
    ],
)
def test_recipes_that_are_none(programs, inputs, message):
    with pytest.raises(TileError, match=message):
        Recipe(tuple(map(tile.read, programs)), inputs, ("Y",))


def test_unknown_parameters_are_refused():
    kernel = KERNELS["transpose"]
    with pytest.raises(TileError, match="transpose: no parameter block_k; there are block_m, block_n"):
        kernel.recipe(CPU, kernel.cases[0], block_k=8)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("matmul", {"activation": "swish"}, "activation is one of none, relu, silu, gelu, got 'swish'"),
        ("attention", {"kv_heads": 2, "heads": 3}, "kv_heads divides heads, got 2 of 3"),
        ("attention", {"causal": True, "keys": 8, "queries": 9}, "as many keys as queries at least, got 8 for 9"),
        ("attention", {"window": 8, "causal": False}, "of a causal query, got 8 with causal=False"),
        ("attention", {"window": 0}, "window is 1 key or more of a causal query, got 0"),
        ("packed_attention", {"window": 8, "causal": False}, "of a causal query, got 8 with causal=False"),
        ("decode_attention", {"kv_heads": 3}, "kv_heads divides heads, got 3 of 8"),
        (
            "block_sparse_attention",
            {"mask_heads": 3},
            "1 or 1 sequences, a number of heads that divides 2, and 1 block",
        ),
        ("block_sparse_attention", {"mask_batch": 3}, "lists of mask_batch=3 sequences"),
        ("block_sparse_attention", {"causal": True, "keys": 8}, "as many keys as queries at least, got 8 for 200"),
        ("block_sparse_attention", {"window": 8}, "of a causal query, got 8 with causal=False"),
        ("mla_decode", {"scale": 0.0}, "scale is from"),
        ("decode_attention", {"page": 16, "pages": 9}, "keys that divides capacity, 1000"),
        ("decode_attention", {"page": 8, "pages": 0}, "pages=0 of page=8 keys; valid are one or more"),
        ("attention_backward", {"kv_heads": 2, "heads": 3}, "kv_heads divides heads, got 2 of 3"),
        ("attention_backward", {"keys": 8, "queries": 9}, "as many keys as queries at least, got 8 for 9"),
        ("attention_backward", {"scale": 0.0}, "scale is from"),
        ("attention_backward", {"window": 0}, "window is 1 key or more of a causal query, got 0"),
        ("block_sparse_attention_backward", {"query_width": 0}, "backward: lists of mask_batch=1 .* width=0 blocks"),
        ("block_sparse_attention_backward", {"mask_heads": 3}, "backward: lists .* heads that divides 2"),
        ("chunk_state", {"groups": 3}, "chunk_state: groups divides heads, got 3 of 2"),
        ("chunk_scan", {"length": 100}, "chunk divides length, got 64 of 100; valid is a length padded with dt = 0"),
        ("w4a16_matmul", {"group": 100}, "group=100 divides k=1024; k is even"),
        ("w4a16_matmul", {"dtype": "float32"}, "dtype is one of float16, bfloat16, got float32"),
        ("w4a16_matmul", {"weights": "float4"}, "weights is float4_e2m1fn, or left out for integers, got float4"),
        ("w4a16_matmul", {"weights": "float4_e2m1fn", "zeros": True}, "is for integers, weights is float4_e2m1fn"),
        (
            "w4a16_matmul",
            {"weights": "float4_e2m1fn", "scale_dtype": "int8"},
            "is float16, as dtype is, or float32 or uint8, got int8",
        ),
        ("w4a16_matmul", {"scale_dtype": "uint8"}, "scale_dtype is float16, as dtype is, or float32, got uint8"),
        ("w4a8_matmul", {"dtype": "uint8"}, "w4a8_matmul: dtype is one of int8, float8_e4m3fn, got uint8"),
        ("w4a8_matmul", {"out_dtype": "int8"}, "out_dtype is one of bfloat16, float16, float32, got int8"),
        ("w8a16_matmul", {"group": 100}, "w8a16_matmul: group=100 divides k=1024"),
        ("w8a16_matmul", {"weights": "int16"}, "weights is one of int8, uint8, float8_e4m3fn, float8_e5m2, got int16"),
        ("w8a16_matmul", {"middle": 3}, "what stands for zero is for integers, weights is float8_e4m3fn"),
        ("w8a16_matmul", {"scale_dtype": "float16"}, "scale_dtype is bfloat16, as dtype is, or float32, got float16"),
        ("w4a8_matmul", {"group": 48}, "w4a8_matmul: group=48 divides k=1024; k is even"),
        ("w4a8_matmul", {"group": 16}, "block_k divides group, .* multiples of 32, got block_k=32 and group=16"),
    ],
)
def test_problems_that_are_refused(name, changes, message):
    kernel = KERNELS[name]
    with pytest.raises(TileError, match=message):
        kernel.recipe(CPU, {**kernel.cases[0], **changes})


@pytest.mark.parametrize(
    "m, n, block",
    [
        (1024, 1024, (64, 128)), (2048, 2048, (128, 256)), (4096, 4096, (128, 256)), (8192, 8192, (128, 256)),
        (128, 28672, (128, 224)), (128, 6144, (64, 96)), (128, 4096, (64, 64)), (2048, 5120, (128, 160)),
    ],
)  # fmt: skip
def test_default_blocks_on_hopper(m, n, block):
    space = KERNELS["matmul"].parameters(HOPPER, {"m": m, "n": n, "k": 4096, "dtype": "bfloat16"})
    assert (space["block_m"][0], space["block_n"][0]) == block


@pytest.mark.parametrize(
    "target, m, n, name",
    [
        (HOPPER, 1, 4096, "skinny_matmul"), (HOPPER, 128, 1024, "split_k_matmul"), (HOPPER, 128, 4096, "matmul"),
        (HOPPER, 4096, 4096, "matmul"), (CPU, 1, 4096, "matmul"),
    ],
)  # fmt: skip
def test_kernel_for_a_product(target, m, n, name):
    assert matmul_for(target, {"m": m, "n": n, "k": 14336, "dtype": "bfloat16"}).name == name


@pytest.mark.parametrize("causal", [False, True])
def test_how_many_blocks_of_keys_the_mask_cuts(causal):
    """Counted element by element: those that some query of a block doesn't see whole, which are the last it sees."""
    for queries, more, block_m, block_n in itertools.product((1, 5, 16, 23), (0, 3, 8), (4, 8), (4, 8, 12)):
        keys, most = queries + more, 0
        for first in range(0, queries, block_m):
            rows = np.arange(first, first + block_m)
            sees = np.minimum(rows + more + 1, keys) if causal else np.full(block_m, keys)
            whole = [sees.min() >= end for end in range(block_n, sees.max() + block_n, block_n)]
            assert whole == sorted(whole, reverse=True)
            most = max(most, whole.count(False))
        assert _cut_blocks(queries, keys, block_m, block_n, causal) == most


def test_a_causal_loop_over_keys_has_no_mask():
    problem = {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 1024, "keys": 1024, "dim": 128, "dtype": "bfloat16"}
    (program,) = KERNELS["attention"].recipe(HOPPER, {**problem, "causal": True}).programs
    turn, masked = 'T.uint32(256), "", "sync"', "-1267650600228229401496703205376.0"  # with turns the loop begins
    before, _, after = tile.lower(program, HOPPER).script().partition(turn)
    assert before.count(masked) == 1  # the mask of the first block
    assert masked not in after


@pytest.mark.parametrize(
    "queries, keys, dim", [(128, 128, 64), (256, 512, 128), (128, 128, 256), (64, 128, 128), (64, 64, 256)]
)
def test_lists_of_blocks_are_as_fast_as_loops_that_are_known(queries, keys, dim):
    """Loads by TMA, two slots at least, the second product deferred, though nobody knows how many blocks there are."""
    kernel = KERNELS["block_sparse_attention"]
    problem = {**kernel.cases[1], "queries": 1024, "keys": 1024, "dim": dim, "query_block": queries, "key_block": keys}
    text = tile.explain(kernel.recipe(HOPPER, problem).programs[0], HOPPER)
    assert "deferred by an iteration" in text and "schedule:" not in text and "slow" not in text
    assert all(int(count) >= 2 for count in re.findall(r"circular buffer of [kv]: (\d+) slots", text))
    assert ("blocks: 2 a multiprocessor" in text) == (queries == 64 and dim < 256)


def test_tiles_are_parts_of_blocks():
    kernel = KERNELS["block_sparse_attention"]
    problem = {**kernel.cases[0], "query_block": 96, "key_block": 80}
    found = kernel.parameters(HOPPER, problem)
    assert (found["block_m"][0], found["block_n"]) == (96, (80,))
    with pytest.raises(
        TileError, match="tiles of 64 queries and 80 keys; valid are numbers that divide query_block=96"
    ):
        kernel.recipe(HOPPER, problem, block_m=64)


def test_tiles_of_gradients_are_parts_of_blocks():
    kernel = KERNELS["block_sparse_attention_backward"]
    with pytest.raises(TileError, match="query_step=48; valid is a number that divides key_block=128"):
        kernel.recipe(HOPPER, kernel.cases[0], query_step=48)


@pytest.mark.parametrize(
    "counts, indices, options, message",
    [
        ([[1, 1]], [[[0], [0]]], {}, r"counts has a number for each list.*got \(1, 2\) and \(1, 2, 1\)"),
        ([[[1, 2]]], [[[[0], [0]]]], {}, r"0 to 1 blocks, as indices has room for; got 2 at \(0, 0, 1\)"),
        ([[[1, 1]]], [[[[0], [3]]]], {}, r"a block of keys is from 0 to 2; got 3 at \(0, 0, 1, 0\)"),
        ([[[2]]], [[[[1, 1]]]], {}, r"at most once; number of times by block; got 2 at \(0, 0, 0, 1\)"),
        ([[[1, 1]]], [[[[2], [2]]]], {"query_width": 1}, r"query_width=1 is as many .*got 2 at \(0, 0, 2\)"),
    ],
)
def test_lists_that_are_refused(counts, indices, options, message):
    with pytest.raises(InputError, match=message):
        lists_of_queries(counts, indices, 3, **options)


def test_tiles_of_keys_go_together_with_pages():
    kernel, problem = KERNELS["decode_attention"], {**KERNELS["decode_attention"].cases[6], "capacity": 3072}
    for page, default in ((1, 16), (8, 128), (16, 128), (48, 96), (64, 128), (256, 128), (384, 128), (100, 100)):
        own = {**problem, "page": page, "capacity": 96 * page}
        assert kernel.parameters(HOPPER, own)["block_n"][0] == default
        kernel.recipe(HOPPER, own)
    with pytest.raises(
        TileError, match="block_n=64 keys in pages of 48; valid is a number of keys that divides a page"
    ):
        kernel.recipe(HOPPER, {**problem, "page": 48, "capacity": 960}, block_n=64)


@pytest.mark.parametrize("target", [HOPPER, Target({"kind": "cuda", "arch": "sm_80"})], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize("index", [6, 7, 8])
def test_pages_are_loaded_ahead(target, index):
    kernel = KERNELS["decode_attention"]
    program, _ = kernel.recipe(target, kernel.cases[index]).programs
    assert "stages of cp.async" in tile.explain(program, target)


def test_steps_of_packed_weights_go_together_with_groups():
    kernel = KERNELS["w4a16_matmul"]
    with pytest.raises(TileError, match="block_k=96 divides a group of 128, or is a number of groups; it is even"):
        kernel.recipe(HOPPER, kernel.cases[0], block_k=96)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_packed_weights_are_loaded_as_bytes(index):
    """By TMA on Hopper, by cp.async on Ampere; tensor cores take from registers what was decoded."""
    kernel = KERNELS["w4a16_matmul"]
    program = kernel.recipe(HOPPER, kernel.cases[index]).programs[0]
    assert "left operand of c += b @ a.T, wgmma" in tile.explain(program, HOPPER)
    assert "circular buffer of raw, scale" in tile.explain(program, HOPPER)
    ampere = Target({"kind": "cuda", "arch": "sm_80"})
    program = kernel.recipe(ampere, kernel.cases[index]).programs[0]
    assert "stages of cp.async" in tile.explain(program, ampere)


@pytest.mark.parametrize(
    "rows, columns, splits", [(1, 28672, 2), (16, 28672, 2), (1, 6144, 4), (1, 33792, 1), (17, 28672, 1)]
)
def test_sums_are_split_where_multiprocessors_share_them_more_evenly(rows, columns, splits):
    """448 tiles are 3.4 for each of 132, some of which have four, and 896 are 6.8 of seven; 528 are four for each."""
    problem = {**KERNELS["w4a16_matmul"].cases[0], "m": rows, "n": columns, "k": 4096}
    assert KERNELS["w4a16_matmul"].parameters(HOPPER, problem)["splits"][0] == splits


@pytest.mark.parametrize("rows, columns, splits", [(128, 6144, 2), (128, 4096, 4), (200, 6144, 2), (128, 28672, 1)])
def test_sums_of_many_rows_are_split_as_often_as_run_at_once(rows, columns, splits):
    """Adding another part takes longer than more even numbers of tiles save."""
    problem = {**KERNELS["w4a16_matmul"].cases[0], "m": rows, "n": columns, "k": 4096}
    assert KERNELS["w4a16_matmul"].parameters(HOPPER, problem)["splits"][0] == splits


@pytest.mark.parametrize(
    "heads, queries, dim, causal, block",
    [
        (128, 4096, 64, False, (192, 128)), (128, 4096, 64, True, (192, 96)), (128, 4096, 128, True, (128, 128)),
        (12, 1024, 64, False, (128, 128)), (64, 128, 64, False, (128, 128)), (128, 4096, 256, True, (128, 64)),
        (128, tirx.Var("n", "int32"), 64, False, (128, 128)),
    ],
)  # fmt: skip
def test_three_warpgroups_share_many_queries_of_narrow_heads(heads, queries, dim, causal, block):
    """Blocks of 192 are fewer, and each takes longer: there have to be many, so that all multiprocessors have some."""
    changed = {"heads": heads, "kv_heads": heads, "queries": queries, "dim": dim, "causal": causal}
    problem = {**KERNELS["attention"].cases[1], **changed}
    space = KERNELS["attention"].parameters(HOPPER, problem)
    assert (space["block_m"][0], space["block_n"][0]) == block


@pytest.mark.parametrize(
    "rows, columns, block",
    [(128, 7168, (128, 64)), (128, 4096, (64, 64)), (64, 14336, (64, 64)), (4096, 7168, (128, 128))],
)
def test_blocks_of_few_scaled_rows_run_all_at_once(rows, columns, block):
    problem = {"m": rows, "n": columns, "k": 2048, "dtype": "float8_e4m3fn"}
    space = KERNELS["block_scaled_matmul"].parameters(HOPPER, problem)
    assert (space["block_m"][0], space["block_n"][0]) == block


@pytest.mark.parametrize("index", [0, 1, 2, 4, 5, 6])
def test_tensor_cores_multiply_decoded_weights_in_eight_bits(index):
    """From registers; sums that go on have no copy beside them."""
    kernel = KERNELS["w4a8_matmul"]
    text = tile.explain(kernel.recipe(HOPPER, kernel.cases[index]).programs[0], HOPPER)
    dtype, sets = kernel.cases[index]["dtype"], "+=" if index == 4 else "="
    assert f"fragment b: {dtype}" in text and f"left operand of part {sets} b @ a.T, wgmma" in text
    assert "circular buffer of raw" in text and ("fragment c" in text) == (index != 4)


@pytest.mark.parametrize("extra", [{}, {"zeros": True}])
@pytest.mark.parametrize(
    "group, dtype", [(128, "int8"), (4096, "int8"), (128, "float8_e4m3fn"), (4096, "float8_e4m3fn")]
)
def test_weights_of_four_bits_times_any_number_of_rows(group, dtype, extra):
    problem = {
        "m": tirx.Var("m", "int64"),
        "n": 256,
        "k": 4096,
        "group": group,
        "dtype": dtype,
        "out_dtype": "bfloat16",
    }
    (program,) = KERNELS["w4a8_matmul"].recipe(HOPPER, problem | extra).programs
    assert "part = b @ a.T, wgmma" in tile.explain(program, HOPPER).replace("+=", "=")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name, case", [("attention_backward", 2), ("block_sparse_attention_backward", 0)])
def test_gradients_of_attention_are_summed_in_registers(name, case, dim, causal):
    """Weights and their gradients are left operands, which go through no shared memory, and tiles have slots."""
    kernel, problem = KERNELS[name], {**KERNELS[name].cases[case], "causal": causal}
    alike = {"deterministic": True} if name == "attention_backward" else {}
    _, keys, queries = kernel.recipe(HOPPER, {**problem, "dim": dim, **alike}).programs
    for program, operands, loaded in ((keys, 2, ("q, top", "do, d")), (queries, 1, ("k", "v"))):
        text = tile.explain(program, HOPPER)
        assert "a producer warp and 2 warpgroups that consume" in text
        assert text.count("left operand of") == operands
        slots = dict(re.findall(r"circular buffer of ([^:]*): (\d+) slots", text))
        assert min(int(slots[name]) for name in loaded) >= 2
    # Operands of products in flight would take the registers of what threads compute, and the assembler would wait.
    settled = "schedule: products end with their iteration" in tile.explain(keys, HOPPER)
    assert settled == (dim == 128 and not causal and name == "attention_backward")  # lists take 32 queries there


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_attention_in_one_pass(dim, causal):
    """TMA adds the gradients of queries in memory, and tiles have slots beside what it takes; in order if asked for."""
    kernel = KERNELS["attention_backward"]
    problem = {**kernel.cases[2], "causal": causal, "dim": dim}
    sums, keys, queries = kernel.recipe(HOPPER, problem).programs
    text = tile.explain(keys, HOPPER)
    assert text.count("added in memory by TMA") == 1
    assert text.count("left operand of") == 1
    slots = dict(re.findall(r"circular buffer of ([^:]*): (\d+) slots", text))
    assert min(int(slots[name]) for name in ("q, top", "do, d")) >= 2
    assert [param.name for param in queries.params] == ["added", "dQ"]
    assert "added" in [param.name for param in sums.params]
    given = kernel.recipe(HOPPER, {**problem, "deterministic": True})
    assert not any("atomically" in tile.explain(program, HOPPER) for program in given.programs)
    with pytest.raises(TileError, match=r"passes=1 adds in any order; valid for deterministic gradients is 2"):
        kernel.recipe(HOPPER, {**problem, "deterministic": True}, passes=1)
    with pytest.raises(TileError, match=r"key_rows=128; valid in one pass is .* key_step=64 or dim=32"):
        kernel.recipe(Target("llvm"), {**problem, "dim": 32}, passes=1, key_rows=128, key_step=64)


@pytest.mark.parametrize("more", [{}, {"causal": True, "window": 62, "sinks": True}])
@pytest.mark.parametrize("dim", [16, 48, 80, 96, 112, 160, 192, 256])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_gradients_of_heads_of_any_width_have_tiles_that_fit(arch, dim, more):
    """What is multiplied has two slots, beside gradients of keys that registers hold."""
    kernel, target = KERNELS["attention_backward"], Target({"kind": "cuda", "arch": arch})
    _, keys, queries, *_ = kernel.recipe(target, {**kernel.cases[2], "dim": dim, **more}).programs
    text = tile.explain(keys, target)
    slots = re.findall(r"circular buffer of [qd][^:]*: (\d+) slots of \d+ bytes  \(as", text)
    stages = re.findall(r"(\d+) stages of cp.async", text)
    assert slots or stages
    assert all(int(count) >= 2 for count in slots + stages)
    tile.plan(queries, target)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", ["chunk_state", "chunk_scan"])
def test_chunks_of_all_sizes_have_blocks_that_fit(name, arch):
    kernel, target = KERNELS[name], Target({"kind": "cuda", "arch": arch})
    for dim, state, chunk in itertools.product((64, 128), (64, 128, 256), (64, 256)):
        problem = {**kernel.cases[1], "dim": dim, "state": state, "chunk": chunk}
        text = tile.explain(kernel.recipe(target, problem).programs[0], target)
        slots = re.findall(r"circular buffer of [^:]*: (\d+) slots of \d+ bytes  \(as", text)
        stages = re.findall(r"(\d+) stages of cp.async", text)
        assert len(slots if arch == "sm_90a" else stages) in (1, 2)
        assert all(int(count) >= 2 for count in slots + stages)


def test_a_kernel_is_the_same_text_each_time():
    """What is compiled is kept by it."""
    kernel = KERNELS["packed_attention"]
    recipes = [kernel.recipe(HOPPER, kernel.cases[0]) for _ in range(4)]
    assert len({tile.lower(recipe.programs[0], HOPPER).script() for recipe in recipes}) == 1


def test_problems_in_one_line():
    assert described({"m": 3, "dtype": "float32", "bias": True, "residual": False, "activation": "silu"}) == (
        "m=3 bias activation=silu"
    )


# ---- The judge -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["matmul", "softmax", "attention", "rms_norm"])
def test_a_right_result_passes_and_one_wrong_element_does_not(name):
    kernel = KERNELS[name]
    problem = kernel.cases[0]
    arrays = kernel.inputs(np.random.default_rng(3), problem)
    expected = kernel.reference(problem, arrays)
    rounded = {name: value.astype(problem["dtype"]) for name, (value, _) in expected.items()}
    assert judged(rounded, expected, 1e-5)[1] == ""
    output = next(iter(expected))
    place = np.unravel_index(np.abs(expected[output].value).argmax(), expected[output].value.shape)
    rounded[output][place] *= 1.01
    fault = judged(rounded, expected, 1e-1)[1]
    assert (
        f"1 elements of {output} are further off than rounding explains, the first at {tuple(map(int, place))}" in fault
    )


def test_a_missing_term_of_a_long_sum_is_found():
    kernel, problem = KERNELS["matmul"], {"m": 8, "n": 8, "k": 1000, "dtype": "bfloat16", "out_dtype": "float32"}
    arrays = kernel.inputs(np.random.default_rng(5), problem)
    expected = kernel.reference(problem, arrays)
    less = expected["C"].value - np.outer(arrays["A"][:, 17].astype("f8"), arrays["B"][:, 17].astype("f8"))
    assert "further off" in judged({"C": less.astype("float32")}, expected, 1.0)[1]


def test_what_was_never_written_is_found():
    value = np.ones((4, 4))
    output = value.copy()
    output[3, 1] = np.nan
    error, fault = judged({"Y": output}, {"Y": Expected(value, value)}, 1e-2)
    assert math.isnan(error)
    assert "relative error nan" in fault
    assert "the first at (3, 1)" in fault


def test_equal_infinities_are_right():
    value = np.array([-np.inf, 1.0])
    assert judged({"L": value}, {"L": Expected(value, np.zeros(2))}, 1e-5) == (0.0, "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_poison_is_no_number(dtype):
    assert np.isnan(poison((2, 3), dtype).astype("float32")).all()


def test_poison_of_integers_is_no_index():
    assert (poison((4,), "int32") == -(2**31)).all()

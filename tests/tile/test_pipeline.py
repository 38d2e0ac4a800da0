"""Tile kernels in the place of blocks that chose them: schedules, tuning records, models."""

import json

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.errors import LowerError
from tvm_axe.lower.tiles import overlaps, with_tile_kernels
from tvm_axe.machines import nvcc
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.target import resolve_target
from tvm_axe.meta import tune
from tvm_axe.records import apply_best
from tvm_axe.schedule import tile_kernel

LLVM = resolve_target("llvm", threads=2)


def block(m: int, n: int, k: int):
    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((m, k), "float32"),
        W: T.Buffer((k, n), "float32"),
        bias: T.Buffer((n,), "float32"),
        residual: T.Buffer((m, n), "float32"),
        out: T.Buffer((m, n), "float32"),
    ):
        C = T.sblock_alloc_buffer((m, n), "float32")
        for i, j, k_ in T.grid(m, n, k):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k_])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
        for i, j in T.grid(m, n):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0)) + residual[vi, vj]

    return main


def data(m, n, k, seed=0):
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape, dtype="float32") for shape in ((m, k), (k, n), (n,), (m, n))]
    a, w, b, r = (array.astype("float64") for array in arrays)
    return arrays, np.maximum(a @ w + b, 0) + r


def run(mod, arrays, shape, dtype="float32", target=LLVM):
    """What a function computes once its blocks' kernels are in their place, over an output of NaNs."""
    out = tvm.runtime.empty(shape, dtype)
    _tvm.as_array(out)[...] = np.nan
    executable = tvm.compile(with_tile_kernels(mod, target), target)
    executable["main"](*(as_tvm(array) for array in arrays), out)
    return _tvm.as_array(out).astype("float64")


def as_tvm(array):
    tensor = tvm.runtime.empty(array.shape, str(array.dtype))
    _tvm.as_array(tensor)[...] = array
    return tensor


def error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("shape", [(64, 96, 48), (37, 53, 29), (1, 17, 5), (130, 1, 64)])
@pytest.mark.parametrize("epilogue", [False, True])
def test_a_product_and_its_epilogue(shape, epilogue):
    sch = s_tir.Schedule(block(*shape))
    chosen = sch.get_sblock("epi") if epilogue else None
    tile_kernel(sch, sch.get_sblock("mm"), "matmul", chosen, block_m=32, block_n=32, block_k=32)
    arrays, want = data(*shape)
    assert error(run(sch.mod, arrays, want.shape), want) < 1e-6
    script = with_tile_kernels(sch.mod, LLVM).script()
    assert "axe.tile" not in script
    assert ("C = T.sblock_alloc_buffer" in script) == (not epilogue)


def test_any_pointwise_epilogue_over_several_dimensions():
    """Heads beside each other, an activation that no kernel has by name, and a result in another type."""

    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((2, 9, 20), "bfloat16"),
        W: T.Buffer((3, 8, 20), "bfloat16"),
        scale: T.Buffer((3,), "float32"),
        out: T.Buffer((2, 9, 3, 8), "float32"),
    ):
        C = T.sblock_alloc_buffer((2, 9, 3, 8), "float32")
        for b, i, h, j, k in T.grid(2, 9, 3, 8, 20):
            with T.sblock("mm"):
                vb, vi, vh, vj, vk = T.axis.remap("SSSSR", [b, i, h, j, k])
                with T.init():
                    C[vb, vi, vh, vj] = T.float32(0)
                C[vb, vi, vh, vj] += T.cast(A[vb, vi, vk], "float32") * T.cast(W[vh, vj, vk], "float32")
        for b, i, h, j in T.grid(2, 9, 3, 8):
            with T.sblock("epi"):
                vb, vi, vh, vj = T.axis.remap("SSSS", [b, i, h, j])
                out[vb, vi, vh, vj] = T.exp(C[vb, vi, vh, vj] * scale[vh]) + T.cast(vi, "float32")

    sch = s_tir.Schedule(main)
    tile_kernel(sch, sch.get_sblock("mm"), "matmul", sch.get_sblock("epi"), block_m=16, block_n=16)
    rng = np.random.default_rng(7)
    a, w = (rng.standard_normal(shape).astype("bfloat16") for shape in ((2, 9, 20), (3, 8, 20)))
    scale = rng.uniform(0.1, 0.3, 3).astype("float32")
    product = np.einsum("bik,hjk->bihj", a.astype("float64"), w.astype("float64"))
    want = np.exp(product * scale[:, None]) + np.arange(9)[:, None, None]
    assert error(run(sch.mod, [a, w, scale], want.shape), want) < 1e-5


@pytest.mark.parametrize("transposed", [False, True])
def test_batches(transposed):
    b_shape = (3, 12, 20) if transposed else (3, 20, 12)

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((3, 10, 20), "float32"), B: T.Buffer(b_shape, "float32"), C: T.Buffer((3, 10, 12), "float32")):
        for b, i, j, k in T.grid(3, 10, 12, 20):
            with T.sblock("mm"):
                vb, vi, vj, vk = T.axis.remap("SSSR", [b, i, j, k])
                with T.init():
                    C[vb, vi, vj] = T.float32(0)
                C[vb, vi, vj] += A[vb, vi, vk] * (B[vb, vj, vk] if transposed else B[vb, vk, vj])

    sch = s_tir.Schedule(main)
    tile_kernel(sch, sch.get_sblock("mm"), "batched_matmul", block_m=16, block_n=16, block_k=16)
    a, b = (np.random.default_rng(3).standard_normal(shape, dtype="float32") for shape in ((3, 10, 20), b_shape))
    want = a.astype("float64") @ (np.swapaxes(b, 1, 2) if transposed else b)
    assert error(run(sch.mod, [a, b], want.shape), want) < 1e-6


def test_programs_that_leave_something_to_each_other():
    """Split-K: two programs, with the partial sums held between them."""

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((24, 512), "float32"), B: T.Buffer((40, 512), "float32"), C: T.Buffer((24, 40), "float32")):
        for i, j, k in T.grid(24, 40, 512):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] += A[vi, vk] * B[vj, vk]

    sch = s_tir.Schedule(main)
    tile_kernel(sch, sch.get_sblock("mm"), "split_k_matmul")
    a, b = (np.random.default_rng(4).standard_normal((rows, 512), dtype="float32") for rows in (24, 40))
    want = a.astype("float64") @ b.astype("float64").T
    assert error(run(sch.mod, [a, b], want.shape), want) < 1e-6


# ---- Refusals ------------------------------------------------------------------------------------------------------


def annotated(sch, name="mm", kernel="matmul", **parameters):
    sch.annotate(sch.get_sblock(name), "axe.tile", kernel)
    for key, value in parameters.items():
        sch.annotate(sch.get_sblock(name), f"axe.tile.{key}", value)
    return sch


def test_annotations_that_cannot_be_kept():
    """Written by hand, as no primitive writes them."""

    def refused(sch, words):
        with pytest.raises(LowerError) as caught:
            with_tile_kernels(sch.mod, LLVM)
        assert not [word for word in words if word not in str(caught.value)], str(caught.value)

    shape = (16, 16, 16)
    refused(annotated(s_tir.Schedule(block(*shape)), "epi"), ("block 'epi'", "matmul()", "is no product of matrices"))
    refused(annotated(s_tir.Schedule(block(*shape)), kernel="gemm"), ("'mm'", "'gemm' is no kernel for products"))
    sch = annotated(s_tir.Schedule(block(*shape)), block_x=3)
    refused(sch, ("'mm'", "matmul(block_x=3)", "no parameter block_x"))


def test_a_block_inside_another():
    sch = annotated(s_tir.Schedule(block(16, 16, 16)))
    sch.blockize(sch.get_loops(sch.get_sblock("mm"))[1])
    with pytest.raises(LowerError, match="main: a block inside another one chose a tile kernel"):
        with_tile_kernels(sch.mod, LLVM)


def test_what_else_reads_the_product():
    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((8, 8), "float32"), B: T.Buffer((8, 8), "float32"), D: T.Buffer((8, 8), "float32"),
             E: T.Buffer((8, 8), "float32")):  # fmt: skip
        C = T.sblock_alloc_buffer((8, 8), "float32")
        for i in range(8):
            for j, k in T.grid(8, 8):
                with T.sblock("mm"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    T.sblock_attr({"axe.tile": "matmul"})
                    with T.init():
                        C[vi, vj] = T.float32(0)
                    C[vi, vj] += A[vi, vk] * B[vk, vj]
            for j in range(8):
                with T.sblock("D"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    D[vi, vj] = C[vi, vj] * T.float32(2)
        for i, j in T.grid(8, 8):
            with T.sblock("E"):
                vi, vj = T.axis.remap("SS", [i, j])
                E[vi, vj] = C[vi, vj] * T.float32(3)

    with pytest.raises(LowerError, match=r"'mm' chose the kernel matmul.*C is used beyond the block 'D' in its nest"):
        with_tile_kernels(tvm.IRModule({"main": main}), LLVM)


# ---- On a mesh -----------------------------------------------------------------------------------------------------


def partial_products(sch):
    mm = sch.get_sblock("mm")
    partial, reduce = sch.shard(sch.get_loops(mm)[2], "tp")
    sch.tile_kernel(partial, "matmul", block_m=32, block_n=32)
    return reduce


def sliced(sch):
    scatter, gather = sch.split_collective(partial_products(sch))
    (gather,) = sch.reorder_collective(gather, [sch.get_sblock("epi")])
    sch.fuse_collective([scatter, sch.get_sblock("epi"), gather])


def rows(sch):
    """Rows shared, the epilogue in the kernel, the results gathered."""
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    sch.cache_write(epi, 0, "global")
    sch.shard(sch.get_loops(mm)[0], "tp", mm)
    sch.tile_kernel(mm, "matmul", epi, block_m=32)


EVEN, UNEVEN = (48, 64, 96), (33, 30, 50)


def test_a_share_that_is_smaller_on_some_devices():
    sch = axe.Schedule(block(*UNEVEN), mesh=axe.Mesh({"tp": 2}))
    rows(sch)
    with pytest.raises(LowerError, match=r"'mm' chose the kernel matmul\(block_m=32\).*the devices divide evenly"):
        axe.compile(sch, work_dir=None)


@pytest.mark.parametrize(
    ("schedule", "shape"), [(partial_products, EVEN), (partial_products, UNEVEN), (sliced, UNEVEN), (rows, EVEN)]
)
def test_on_a_mesh(schedule, shape):
    mesh = axe.Mesh({"tp": 2})
    sch = axe.Schedule(block(*shape), mesh=mesh)
    schedule(sch)
    exe = axe.compile(sch, work_dir=None)
    (line,) = [line for line in exe.show().splitlines() if "(matmul(block_m=32" in line]
    assert " local " in line
    arrays, want = data(*shape, seed=1)
    with axe.launch(mesh, engine="threads") as workers:
        got = exe.run(workers, *arrays)
    assert error(got.astype("float64"), want) < 1e-6


# ---- Tuning --------------------------------------------------------------------------------------------------------


def keep_only_kernels(folder):
    """Leave nothing but the tile kernels that ran, which are then the fastest that is known."""
    found = 0
    for records in folder.rglob("database_tuning_record.json"):
        lines = [line for line in records.read_text().splitlines() if "axe.tile" in line]
        good = [line for line in lines if json.loads(line)[1][1][0] < 1]
        records.write_text("".join(f"{line}\n" for line in good))
        found += len(good)
    assert found, "no candidate was a tile kernel that ran"


def test_tuning_chooses_kernels_and_records_replay(tmp_path):
    shape = (64, 80, 48)
    func = block(*shape)
    tune(func, target=LLVM, trials=10, work_dir=tmp_path, seed=5, progress=False)
    keep_only_kernels(tmp_path)
    mod, seconds = apply_best(tvm.IRModule({"main": func}), LLVM, tmp_path)
    assert "axe.tile" in mod.script() and "main" in seconds
    arrays, want = data(*shape, seed=2)
    assert error(run(mod, arrays, want.shape), want) < 1e-6


def test_what_a_schedule_chose_is_not_tuned(tmp_path):
    sch = s_tir.Schedule(block(16, 16, 16))
    tile_kernel(sch, sch.get_sblock("mm"), "matmul")
    with pytest.raises(axe.TuneError, match="main: its schedule chose a tile kernel"):
        tune(sch.mod["main"], target=LLVM, trials=2, work_dir=tmp_path)


def test_a_model_uses_what_was_recorded(tmp_path):
    """Relax: the kernels of the model's matmuls come from the database."""
    from tvm.relax.frontend import nn

    class Model(nn.Module):
        def __init__(self):
            self.linear = nn.Linear(32, 24, bias=True)

        def forward(self, x):
            return nn.op.relu(self.linear(x))

    model, _ = Model().export_tvm({"forward": {"x": nn.spec.Tensor((2, 8, 32), "float32")}})
    mesh = axe.Mesh({"tp": 1})
    plain = axe.compile(model, mesh=mesh, work_dir=None)
    tune(plain.module, target=plain.target, trials=6, work_dir=tmp_path, seed=1, progress=False)
    keep_only_kernels(tmp_path)
    exe = axe.compile(model, mesh=mesh, work_dir=tmp_path)
    assert "axe.tile" in exe.module.script()
    rng = np.random.default_rng(9)
    x, weight, bias = (rng.standard_normal(shape, dtype="float32") for shape in ((2, 8, 32), (24, 32), (24,)))
    with axe.launch(mesh, engine="threads") as workers:
        got = exe.run(workers, x, weight, bias)
    want = np.maximum(x.astype("float64") @ weight.T + bias, 0)
    assert error(got.astype("float64"), want) < 1e-6
    recorded, plain = (
        tvm.relax.get_pipeline("axe", mesh=mesh, work_dir=folder)(model).script() for folder in (tmp_path, None)
    )
    nest = 'T.sblock("NT_matmul")'
    assert nest in plain and nest not in recorded and "axe.tile" not in recorded


# ---- CUDA ----------------------------------------------------------------------------------------------------------


def test_cuda_without_a_gpu(tmp_path, monkeypatch):
    """A stage of a mesh program as a kernel for Hopper: host code that calls it, and a cubin."""
    try:
        nvcc.find_compiler()
    except axe.TileError:
        pytest.skip("neither nvcc nor nvrtc on this machine")
    target = resolve_target({"kind": "cuda", "arch": "sm_90a"})

    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((256, 128), "bfloat16"), B: T.Buffer((256, 128), "bfloat16"), C: T.Buffer((256, 256), "bfloat16")
    ):
        for i, j, k in T.grid(256, 256, 128):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.bfloat16(0)
                C[vi, vj] += A[vi, vk] * B[vj, vk]

    sch = axe.Schedule(main, mesh=axe.Mesh({"tp": 1}))
    sch.tile_kernel(sch.get_sblock("mm"), "matmul", block_m=128, block_n=128, block_k=64)
    exe = axe.compile(sch, target=target, work_dir=None)
    mod = with_tile_kernels(tvm.IRModule({"main": exe.module["mm"].with_attr("global_symbol", "main")}), target)
    store = Cache(tmp_path)
    module, source = _tvm.build_cuda(mod, target, lambda text: nvcc.cubin(text, target, store))
    assert "wgmma" in source and module["main"] is not None
    assert len(store.entries()) == 1


def product(m, n, k, dtype="bfloat16"):
    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((m, k), dtype),
        B: T.Buffer((n, k), dtype),
        bias: T.Buffer((n,), dtype),
        out: T.Buffer((m, n), dtype),
    ):
        C = T.sblock_alloc_buffer((m, n), "float32")
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm"):
                vi, vj, vl = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + T.cast(A[vi, vl], "float32") * T.cast(B[vj, vl], "float32")
        for i, j in T.grid(m, n):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.cast(T.max(C[vi, vj] + T.cast(bias[vj], "float32"), T.float32(0)), dtype)

    return main


LAUNCHES = {"matmul": 1, "split_k_matmul": 2, "stream_k_matmul": 3, "skinny_matmul": 1}


def on_hopper(kernel, m, n, k):
    """The product with a kernel for it, as one function."""
    sch = s_tir.Schedule(product(m, n, k))
    tile_kernel(sch, sch.get_sblock("mm"), kernel, sch.get_sblock("epi"))
    target = resolve_target({"kind": "cuda", "arch": "sm_90a"})
    return with_tile_kernels(sch.mod, target), target


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_a_function_of_several_launches(kernel):
    """What one kernel leaves for the next is allocated on the GPU by the host code, which launches them all."""
    mod, target = on_hopper(kernel, 24, 256, 2048)
    sources = []

    def to_cubin(source):
        sources.append(source)
        return b""

    module, _ = _tvm.build_cuda(mod, target, to_cubin, overlaps(mod))
    assert sources[0].count("__global__") == 2 * LAUNCHES[kernel]  # declared and defined
    assert ("TVMBackendAllocWorkspace" in module.inspect_source("ll")) == (LAUNCHES[kernel] > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", LAUNCHES)
def test_launches_of_one_function_on_a_gpu(kernel, tmp_path, cuda):
    if cuda.compute_version != "9.0":
        pytest.skip(f"the GPU has compute capability {cuda.compute_version}, not 9.0")
    m, n, k = 24, 250, 2048
    mod, target = on_hopper(kernel, m, n, k)
    rng, store = np.random.default_rng(0), Cache(tmp_path)
    arrays = [rng.standard_normal(shape).astype("bfloat16") for shape in ((m, k), (n, k), (n,))]
    module, _ = _tvm.build_cuda(mod, target, lambda text: nvcc.cubin(text, target, store), overlaps(mod))
    out = tvm.runtime.tensor(np.full((m, n), np.nan).astype("bfloat16"), tvm.cuda())
    module["main"](*(tvm.runtime.tensor(array, tvm.cuda()) for array in arrays), out)
    a, b, bias = (array.astype("float64") for array in arrays)
    assert error(out.numpy().astype("float64"), np.maximum(a @ b.T + bias, 0)) < 1e-2

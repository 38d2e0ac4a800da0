"""Taking a scheduled function apart: what each device runs over and touches, and what can't be lowered."""

import pytest
import tvm
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.lower.parsing import parse_program
from tvm_axe.schedule import Schedule

TP2 = Mesh({"tp": 2})


@T.prim_func(s_tir=True)
def copy(A: T.Buffer((6,), "float32"), B: T.Buffer((6,), "float32")):
    for i in range(6):
        with T.sblock("b"):
            vi = T.axis.spatial(6, i)
            B[vi] = A[vi]


def bound(func, *, extent, inner=False, axis="tp"):
    """`func`'s one loop split in `extent` pieces, the outer or inner loop bound by hand."""
    sch = s_tir.Schedule(func)
    loops = sch.split(sch.get_loops(sch.get_sblock("b"))[0], [None, extent] if inner else [extent, None])
    sch.annotate(loops[1 if inner else 0], "axe.bind", axis)
    return sch.mod["main"]


def shape_of(block):
    """Device axes, peer axes, local iterators with their extents, and the accesses in the device's terms."""
    local = {str(it.local.var): int(it.local.dom.extent) for it in block.iterators if it.local is not None}
    accesses = [f"{a.buffer.name}{[str(i) for i in a.indices]}" for a in block.accesses]
    return list(block.device), list(block.peers), local, accesses


@pytest.mark.parametrize(
    ("m", "k", "rows", "columns"),
    [(4, 8, 2, 4), (5, 7, 3, 4)],
)
def test_fused_schedule(scheduled, m, k, rows, columns):
    """Even and not: pieces are ceil(extent / devices)."""
    sch = scheduled("MM-fuse(RS-C-AG)", m, 2, k)
    program = parse_program(sch.mod["main"], sch.mesh)
    assert [stage.name for stage in program.stages] == ["mm_rf", "mm_epi_out_global"]
    bound = [{axis for block in stage.blocks for axis in (*block.device, *block.peers)} for stage in program.stages]
    assert bound == [{"tp"}, {"tp"}]
    partial, scatter, epi, gather = program.blocks()
    assert shape_of(partial) == (
        ["tp"],
        [],
        {"vi": m, "vj": 2, "vk_1": columns},
        [
            "C.rf['tp', 'vi', 'vj']",
            f"A['vi', 'tp * {columns} + vk_1']",
            f"W['tp * {columns} + vk_1', 'vj']",
        ],
    )
    row = f"tp * {rows} + vi"
    assert shape_of(scatter) == (
        ["tp"],
        ["tp"],
        {"vk_0": 2, "vi": rows, "vj": 2},
        [f"C_global['{row}', 'vj']", f"C.rf['vk_0', '{row}', 'vj']"],
    )
    assert shape_of(epi)[3] == [
        f"out_global['{row}', 'vj']",
        f"C_global['{row}', 'vj']",
        "bias['vj']",
        f"residual['{row}', 'vj']",
    ]
    assert [access.pieces for access in gather.accesses] == [{0: (("tp", rows),)}] * 2


def test_axis_of_one_device_binds_nothing(scheduled):
    sch = scheduled("MM-fuse(RS-C-AG)", tp=1)
    program = parse_program(sch.mod["main"], sch.mesh)
    assert all(not block.device and not block.peers for block in program.blocks())


def test_running_value_of_a_sum_is_no_read(scheduled):
    sch = scheduled(None)
    matmul, _ = parse_program(sch.mod["main"], sch.mesh).blocks()
    assert [access.buffer.name for access in matmul.reads] == ["A", "W"]


def test_names_are_identifiers_and_differ():
    """rfactor calls its buffer `C.rf`; a parameter has that name, or as good as that, already."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 8), "float32"), C_rf: T.Buffer((4,), "float32"), out: T.Buffer((4,), "float32")):
        C = T.sblock_alloc_buffer((4,))
        for i, k in T.grid(4, 8):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    C[vi] = T.float32(0)
                C[vi] = C[vi] + A[vi, vk]
        for i in range(4):
            with T.sblock("add"):
                vi = T.axis.spatial(4, i)
                out[vi] = C[vi] + C_rf[vi]

    sch = Schedule(program, mesh=TP2)
    sch.shard(sch.get_loops(sch.get_sblock("sum"))[1], "tp")
    assert sorted(parse_program(sch.mod["main"], TP2).names.values()) == ["A", "C", "C_rf", "C_rf_1", "out"]


def test_unknown_axis():
    with pytest.raises(LowerError, match=r"'i_0' is bound to 'dp', which the mesh \(tp=2\) doesn't have"):
        parse_program(bound(copy, extent=2, axis="dp"), TP2)


def test_mesh_of_another_size():
    with pytest.raises(LowerError, match=r"has 2 iterations and is bound to 'tp', which has 3 devices; compile for"):
        parse_program(bound(copy, extent=2), Mesh({"tp": 3}))


def test_cyclic_sharding():
    """Device d takes elements d, d + 2, ...: not a contiguous piece."""
    with pytest.raises(LowerError, match=r"iterator 'vi' = i_0 \* 2 \+ i_1 is not shared over 'tp' in contiguous"):
        parse_program(bound(copy, extent=2, inner=True), TP2)


def test_two_axes_on_one_dimension(scheduled):
    sch = Schedule(scheduled(None).mod, mesh=Mesh({"dp": 2, "tp": 2}))
    epi = sch.get_sblock("epi")
    _, local = sch.shard(sch.get_loops(epi)[0], "dp")
    sch.shard(local, "tp")
    (block,) = [b for b in parse_program(sch.mod["main"], sch.mesh).blocks() if b.name == "epi"]
    assert block.writes[0].pieces == {0: (("dp", 2), ("tp", 1))}


def test_two_loops_bound_to_one_axis():
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((2, 2), "float32"), B: T.Buffer((2, 2), "float32")):
        for i in T.serial(2, annotations={"axe.bind": "tp"}):
            for j in T.serial(2, annotations={"axe.bind": "tp"}):
                with T.sblock("b"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    B[vi, vj] = A[vi, vj]

    with pytest.raises(LowerError, match="'b' has two loops bound to 'tp' of one kind; bind one"):
        parse_program(program, TP2)


def test_nested_blocks(scheduled):
    sch = scheduled(None)
    sch.blockize(sch.get_loops(sch.get_sblock("epi"))[1])
    with pytest.raises(LowerError, match=r"its body is not one store; schedule for the mesh\s+first \(before blockize"):
        parse_program(sch.mod["main"], sch.mesh)


def test_initialisation_taken_apart_is_a_block_of_its_own(scheduled):
    """decompose_reduction leaves an update without an init, which reads what it writes."""
    sch = scheduled(None)
    mm = sch.get_sblock("mm")
    sch.decompose_reduction(mm, sch.get_loops(mm)[2])
    blocks = parse_program(sch.mod["main"], sch.mesh).blocks()
    assert [block.name for block in blocks] == ["mm_init", "mm_update", "epi"]
    assert [access.buffer.name for access in blocks[1].reads] == ["C", "A", "W"]


def test_function_without_blocks():
    @T.prim_func
    def program(A: T.Buffer((4,), "float32")):
        for i in range(4):
            A[i] = T.float32(0)

    with pytest.raises(
        LowerError, match=r"program: not a schedulable function; write it with @T.prim_func\(s_tir=True"
    ):
        parse_program(program, TP2)


def test_scalar_parameter():
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4,), "float32"), n: T.int32):
        for i in range(4):
            with T.sblock("b"):
                vi = T.axis.spatial(4, i)
                A[vi] = T.Cast("float32", n)

    with pytest.raises(LowerError, match="program: parameter 'n' is not a buffer"):
        parse_program(program, TP2)


def test_symbolic_shape():
    program = tvm.script.from_source("""
@T.prim_func(s_tir=True)
def program(a: T.handle, b: T.handle):
    n = T.int32()
    A = T.match_buffer(a, (n,), "float32")
    B = T.match_buffer(b, (n,), "float32")
    for i in range(n):
        with T.sblock("b"):
            vi = T.axis.spatial(n, i)
            B[vi] = A[vi]
""")
    with pytest.raises(LowerError, match=r"program: buffer 'A' has the shape .*; every extent must be a number"):
        parse_program(program, TP2)


def test_statement_that_is_no_loop_or_block():
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        for i in range(4):
            if i > 1:
                with T.sblock("b"):
                    vi = T.axis.spatial(4, i)
                    B[vi] = A[vi]

    with pytest.raises(LowerError, match="a nest holds a IfThenElse; a scheduled function is made of loops and blocks"):
        parse_program(program, TP2)

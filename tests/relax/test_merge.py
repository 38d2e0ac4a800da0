"""One function out of a Relax function: what it computes, what it is called, and what is refused."""

# ruff: noqa: RET504, SIM108 (TVMScript returns variables and has no conditional expression)

import numpy as np
import pytest
import tvm
from tvm.relax.frontend import nn
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.relax import merge


def run(func, arrays, shapes):
    """What the merged function computes, on one device, into poisoned outputs."""
    outputs = [tvm.runtime.tensor(np.full(shape, np.nan, "float32")) for shape in shapes]
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    tvm.compile(module, target="llvm")["main"](*[tvm.runtime.tensor(array) for array in arrays], *outputs)
    return [output.numpy() for output in outputs]


def blocks(func):
    sch = tvm.s_tir.Schedule(func)
    return [sch.get(block).name_hint for block in sch.get_child_blocks(sch.get_sblock("root"))]


def test_parameters_then_results_under_their_names(export, draw, alone):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    mod = export(layers, lambda m, x: m.down(nn.op.silu(m.up(x))), x=(6, 8))
    func, arrays = merge(mod), draw(mod)
    assert [param.name for param in func.params] == ["x", "up_weight", "up_bias", "down_weight", "down_bias", "gv"]
    assert func.attrs["global_symbol"] == "forward"
    assert blocks(func) == [
        "permute_dims", "matmul", "add", "silu_compute", "silu", "permute_dims1", "matmul1", "gv",
    ]  # fmt: skip
    np.testing.assert_allclose(run(func, arrays, [(6, 8)])[0], alone(mod, arrays), rtol=1e-5, atol=1e-6)


def test_a_kernel_called_twice_has_buffers_and_names_of_its_own(draw, alone):
    @I.ir_module
    class Model:
        @T.prim_func(s_tir=True, private=True)
        def square(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
            kept = T.sblock_alloc_buffer((4, 4), "float32")
            for i, j in T.grid(4, 4):
                with T.sblock("copy"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    kept[vi, vj] = A[vi, vj]
            for i, j in T.grid(4, 4):
                with T.sblock("B"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    B[vi, vj] = kept[vi, vj] * kept[vi, vj]

        @R.function
        def main(x: R.Tensor((4, 4), "float32")):
            cls = Model
            with R.dataflow():
                y = R.call_tir(cls.square, (x,), out_ty=R.Tensor((4, 4), "float32"))
                z = R.call_tir(cls.square, (y,), out_ty=R.Tensor((4, 4), "float32"))
                R.output(z)
            return z

    (x,) = draw(Model)
    func = merge(Model)
    assert blocks(func) == ["y_kept", "y", "z_kept", "z"]
    np.testing.assert_allclose(run(func, [x], [(4, 4)])[0], x.astype("float64") ** 4, rtol=1e-5)


def test_tuples_are_unpacked_and_results_flattened(draw, alone):
    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((4, 4), "float32")):
            halves = R.split(x, 2)
            second = R.multiply(halves[1], R.const(2.0, "float32"))
            return (halves[0], (second, R.add(second, second)))

    (x,) = draw(Model)
    found = run(merge(Model), [x], [(2, 4)] * 3)
    for one, other in zip(found, [x[:2], 2 * x[2:], 4 * x[2:]]):
        np.testing.assert_array_equal(one, other)


def test_names_that_relax_has_twice_are_told_apart():
    builder = tvm.relax.BlockBuilder()
    x = tvm.relax.Var("layer.x", tvm.relax.TensorType((4,), "float32"))
    y = tvm.relax.Var("layer_x", tvm.relax.TensorType((4,), "float32"))
    with builder.function("main", [x, y]):
        builder.emit_func_output(builder.emit(tvm.relax.op.add(x, y), "layer_x"))
    assert [param.name for param in merge(builder.finalize()).params] == ["layer_x", "layer_x_1", "layer_x_2"]


# ---- what is refused ---------------------------------------------------------------------------------------------


@I.ir_module
class Packed:
    @R.function
    def main(x: R.Tensor((4, 4), "float32")):
        y = R.call_dps_packed("elsewhere", x, out_ty=R.Tensor((4, 4), "float32"))
        return y


@I.ir_module
class Extern:
    @R.function(pure=False)
    def main(x: R.Tensor((4, 4), "float32")):
        y = R.call_packed("elsewhere", x, ty_args=R.Tensor((4, 4), "float32"))
        return y


@I.ir_module
class Branch:
    @R.function
    def main(c: R.Tensor((), "bool"), x: R.Tensor((4, 4), "float32")):
        if c:
            y = R.add(x, x)
        else:
            y = R.multiply(x, x)
        return y


@I.ir_module
class Constant:
    @R.function
    def main(x: R.Tensor((2,), "float32")):
        y = R.add(x, R.const(np.ones(2, "float32")))
        return y


@I.ir_module
class Symbolic:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32")):
        n = T.int64()
        y: R.Tensor((n, 4), "float32") = R.add(x, x)
        return y


@I.ir_module
class Unknown:
    @R.function
    def main(x: R.Tensor(dtype="float32", ndim=2)):
        y = R.add(x, x)
        return y


@I.ir_module
class Pack:
    @R.function
    def main(both: R.Tuple(R.Tensor((4,), "float32"), R.Tensor((4,), "float32"))):
        y = R.add(both[0], both[1])
        return y


@I.ir_module
class Indices:
    @R.function
    def main(x: R.Tensor((4, 5), "float32")):
        y = R.argmax(x, axis=1)
        return y


@I.ir_module
class Large:
    @R.function
    def main(x: R.Tensor((65536, 32768), "float32")):
        y = R.add(x, x)
        return y


@I.ir_module
class GivenBack:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        y = R.add(x, x)
        return (y, x)


@I.ir_module
class Twice:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        y = R.add(x, x)
        return (y, y)


@I.ir_module
class Nothing:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        return R.tuple()


@I.ir_module
class Fixed:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        return R.const(1.0, "float32")


@I.ir_module
class Several:
    @R.function
    def first(x: R.Tensor((4,), "float32")):
        y = R.add(x, x)
        return y

    @R.function
    def second(x: R.Tensor((4,), "float32")):
        y = R.add(x, x)
        return y


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (Packed, r"main: y = relax.call_dps_packed\(...\) has no TensorIR form.*valid are operators that LegalizeOps"),
        (Extern, r'main: y = call_packed\("elsewhere", ...\) has no TensorIR form'),
        (Branch, r"main: y = If has no TensorIR form"),
        (Constant, r"main: y takes a \w*Const\w* beside plain tensors; make a constant a parameter"),
        (Symbolic, r"parameter 'x' has the shape .*n, 4.*; every extent must be a number: bind the symbolic ones"),
        (Unknown, r"parameter 'x' has no known shape; every extent must be a number"),
        (Pack, r"parameter 'both' is a Tuple\w*; valid is a tensor"),
        (Indices, r"variable 'y' holds int64.*use int32"),
        (Large, r"parameter 'x' has 2147483648 elements; at most 2147483647"),
        (GivenBack, r"'x' is returned and is a parameter or returned before"),
        (Twice, r"'y' is returned and is a parameter or returned before"),
        (Nothing, r"main: it returns no tensor"),
        (Fixed, r"main: it returns a \w*Const\w*; valid are tensors that it computes"),
        (Several, r"one Relax function; the module's are: first, second"),
        (tvm.IRModule({}), r"one Relax function; the module's are: none"),
    ],
)
def test_refused(mod, message):
    with pytest.raises(axe.LowerError, match=message):
        merge(mod)

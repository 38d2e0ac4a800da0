"""Values that a user pins, by name, by upstream's types and annotations, along one mesh axis or several."""

import numpy as np
import pytest
import shared_models as models
from tvm import relax
from tvm.relax.distributed import DeviceMesh, Placement
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import tvm_axe as axe
from tvm_axe.collective.engine import Rates
from tvm_axe.layout import Link
from tvm_axe.relax import share_model

SQUARE = axe.Mesh({"dp": 2, "tp": 2})
SLOW = Rates(Link(latency=0.0, bandwidth=1e10), memory=1e12, operations=2e10)
"""Devices on which models of a few numbers are worth sharing."""


@pytest.fixture(scope="module")
def square():
    with axe.launch(SQUARE, engine="threads") as both:
        yield both


def forms(model, mesh, **options):
    """The forms of parameters and results by name."""
    function = share_model(model, mesh, **options).functions["forward"]
    placed = {each.name: each.tensors[0].shown for each in function.inputs}
    return placed | {f"result {at}": each.shown for at, each in enumerate(function.results)}


def error(found, wanted):
    found = [found] if isinstance(found, np.ndarray) else found
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, wanted, strict=True))


def chain(annotated=""):
    """Two products: x @ w is hidden, annotated as upstream does or not; its relu active, and that @ v the result."""
    devices = DeviceMesh((2, 2), list(range(4)))
    builder = relax.BlockBuilder()
    x, w, v = (relax.Var(name, relax.TensorType((8, 8), "float32")) for name in "xwv")
    with builder.function("forward", [x, w, v], attrs={"num_input": 1}):
        with builder.dataflow():
            made = relax.op.matmul(x, w)
            if annotated:
                of, placement = builder.emit(made), Placement.from_text(annotated)
                made = relax.op.distributed.annotate_sharding(of, devices, placement)
            hidden = builder.emit(made, name_hint="hidden")
            out = builder.emit_output(relax.op.matmul(builder.emit(relax.op.nn.relu(hidden), name_hint="active"), v))
        builder.emit_func_output(out)
    return builder.get()


def test_of_parameters_by_name():
    model, mesh = models.encoder(), axe.Mesh({"tp": 2})
    found = forms(model, mesh, pins={"layers.*.up.weight": 1, "layers.*.q.weight": None})
    assert found["layers.0.up.weight"] == "S1[24@0 24@1]"
    assert found["layers.0.q.weight"] == "R"
    laid = forms(model, mesh, pins={"layers.0.up.weight": "S[(96, 2, 24) : (24, 1@tp, 1)]"})
    assert laid["layers.0.up.weight"] == "S1[24@0 24@1]"


def test_along_axes_each():
    found = forms(chain(), SQUARE, pins={"x": {"dp": 0}, "w": {"tp": 1, "dp": None}, "v": 0})
    assert found["x"].startswith("dp:S0[4@0 4@1]")
    assert found["w"] == "tp:S1[4@0 4@1]"
    assert found["v"] == "dp:S0[4@0 4@1] tp:S0[2@0 2@1]"
    laid = forms(chain(), SQUARE, pins={"w": "S[(2, 4, 2, 4) : (1@dp, 4, 1@tp, 1)]"})
    assert laid["w"] == "dp:S0[4@0 4@1] tp:S1[4@0 4@1]"


def norms():
    """What reduces inside: collectives stand there where the dimension is shared before and behind."""
    builder = relax.BlockBuilder()
    x, w, b = (
        relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in zip("xwb", ((4, 24), (24,), (24,)))
    )
    with builder.function("forward", [x, w, b], attrs={"num_input": 1}):
        with builder.dataflow():
            normed = builder.emit(relax.op.nn.layer_norm(x, w, b, axes=[-1]), name_hint="normed")
            soft = builder.emit(relax.op.nn.softmax(normed, -1), name_hint="soft")
            out = builder.emit_output(relax.op.nn.rms_norm(soft, w, axes=[-1]))
        builder.emit_func_output(out)
    return builder.get()


PINNED = {
    "parameters": (chain, {"x": {"dp": 1}, "w": {"tp": 0}, "v": 1}),
    "variables": (chain, {"hidden": {"dp": 1, "tp": 0}, "active": 0}),
    "a layout": (chain, {"hidden": "S[(2, 4, 2, 4) : (1@dp, 4, 1@tp, 1)]"}),
    "annotations": (lambda: chain("S[1], S[0]"), {}),
    "an axis": (chain, {"hid*": {"tp": 1}}),
    "norms": (norms, {"x": 1, "soft": 1, "w": 0, "b": 0}),
    "vocabulary": (lambda: models.decoder(vocab=9), {"embed.weight": 0, "head.weight": {"tp": 0, "dp": None}}),
}


@pytest.mark.parametrize("name", PINNED)
def test_pinned_models_equal_one_device(name, square):
    make, pins = PINNED[name]
    model = make()
    arrays = models.drawn(model)
    plain = chain() if name == "annotations" else model  # upstream's own build of what is annotated there is none
    exe = axe.compile(model, mesh=SQUARE, work_dir=None, pins=pins)
    for _ in range(2):
        assert error(exe.run(square, *arrays), models.alone(plain, arrays)) < 1e-5


@pytest.mark.parametrize("devices", [2, 3])
def test_collectives_inside_norms(devices):
    """Sums and a maximum are all that is moved: two of a layer norm, two of a softmax, one of an RMS norm."""
    shared = share_model(norms(), axe.Mesh({"tp": devices}), rates=SLOW, pins={"x": 1, "soft": 1, "w": 0, "b": 0})
    found = shared.functions["forward"].chosen
    assert found.collectives == {"all_reduce": 4, "exchange": 1}
    assert found.bytes == 4 * 2 * -(-4 * 4 * (devices - 1) // devices) + 4 * 4 * (devices - 1)


def test_rows_of_a_vocabulary():
    """A device has its rows of the table and of the head: words that are another's are zeros, and summed up."""
    pins = {"embed.weight": 0, "head.weight": 0}
    function = share_model(models.decoder(vocab=512), axe.Mesh({"tp": 2}), rates=SLOW, pins=pins).functions["forward"]
    values = function.chosen.graph.values
    (table,) = [
        choice for choice in function.chosen.choices if "embed.weight" in {values[v].name for v in choice.node.ins}
    ]
    assert table.strategy.outs[0].partial == "sum"
    assert function.results[0].shown == "S2[256@0 256@1]"


def test_variables_are_in_the_form_that_is_pinned():
    """Whatever is cheaper: the product is computed as it is wanted, or what it leaves is moved before it's read."""
    for dim in (0, 1, None):
        chosen = share_model(chain(), axe.Mesh({"tp": 2}), pins={"hidden": dim}).functions["forward"].chosen
        (pin,) = [choice for choice in chosen.choices if choice.node.pins is not None]
        assert pin.strategy.ins[0].dim == dim
        assert (pin.node.ins[0], pin.strategy.ins[0]) in {
            *((of, form) for choice in chosen.choices for of, form in zip(choice.node.outs, choice.strategy.outs)),
            *((each.value, each.target) for choice in chosen.choices for each in choice.moves),
        }


def test_distributed_tensors_of_upstream(square):
    @I.ir_module
    class Model:
        I.module_global_infos({"mesh": [R.device_mesh((2, 2), I.Range(0, 4))]})

        @R.function
        def forward(
            x: R.DTensor((8, 16), "float32", "mesh[0]", "S[0], R"),
            w: R.DTensor((16, 32), "float32", "mesh[0]", "R, S[1]"),
        ) -> R.DTensor((8, 32), "float32", "mesh[0]", "S[0], R"):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                a: R.DTensor((8, 32), "float32", "mesh[0]", "S[0], S[1]") = R.matmul(x, w)
                b = R.dist.redistribute(a, "mesh[0]", "S[0], R")
                R.output(b)
            return b

    assert forms(Model, SQUARE) == {
        "x": "dp:S0[4@0 4@1]", "w": "tp:S1[16@0 16@1]", "result 0": "dp:S0[4@0 4@1]",
    }  # fmt: skip
    x, w = (np.random.default_rng(0).standard_normal(shape, dtype="float32") for shape in ((8, 16), (16, 32)))
    exe = axe.compile(Model, mesh=SQUARE, work_dir=None)
    assert error(exe.run(square, x, w), [x @ w]) < 1e-5
    with pytest.raises(
        axe.InputError, match=r"pin 'w' and R.DTensor|R.DTensor\(.*\) of 'w' and pin 'w' differ about w"
    ):
        share_model(Model, SQUARE, pins={"w": 0})
    with pytest.raises(
        axe.InputError, match=r"device mesh of shape \(2, 2\), and the model is shared over tp of mesh tp=4"
    ):
        share_model(Model, axe.Mesh({"tp": 4}))


def test_what_is_wrong_is_said():
    model, mesh = models.encoder(), axe.Mesh({"tp": 2})

    def refused(match, pins, of=model, on=mesh):
        with pytest.raises(axe.InputError, match=match):
            share_model(of, on, pins=pins)

    both = r"pin 'layers.\*.up.weight' and pin '\*.up.weight' differ about layers.0.up.weight: along tp one shares dim"
    refused(both, {"layers.*.up.weight": 1, "*.up.weight": 0})
    refused(r"pin 'nothing' is of no parameter and no variable; there are x, mask, layers.0", {"nothing": 0})
    refused(r"has 2 dimensions, there is no dimension 2", {"layers.0.up.weight": 2})
    refused(r"dimension 0 of x has one index, which the devices along tp can't share", {"x": 0})
    refused(r"x is to be shared over pp; the model is shared over tp alone", {"x": {"pp": 1}})
    refused(r"dealt out over outer axes first: dp, tp", {"x": "S[(2, 2, 2, 8) : (1@tp, 1@dp, 8, 1)]"}, chain(), SQUARE)
    refused(
        r"pin 'hid\*' and pin '\*den' differ about hidden: along dp", {"hid*": 0, "*den": {"dp": 1}}, chain(), SQUARE
    )
    annotated = chain("S[1], R")
    by = r"R.dist.annotate_sharding\('S\[1\], R'\) in 'hidden'"
    refused(rf"pin 'hidden' and {by} differ about hidden: along dp", {"hidden": None}, annotated, SQUARE)


def test_pins_that_take_more_than_the_memory_are_refused():
    """Named with their bytes, the largest first; what fits is no worse for being pinned."""
    model = models.encoder(1, 16, 4, 32, 8)
    mesh = axe.Mesh({"tp": 2})
    with pytest.raises(
        axe.InputError,
        match=r"forward: memory= allows 4,\d\d\d bytes of weights a device, and with what is pinned it holds 6,\d\d\d "
        r"at least: layers\.0\.(up|down)\.weight \(tp: R\) 2,048, .*; leave pins out, pin dimensions that are shared",
    ):
        share_model(model, mesh, memory=0.51, pins={"layers.*.up.weight": None, "layers.*.down.weight": None})
    with pytest.raises(axe.InputError, match=r"memory= allows 4,000 bytes"):
        share_model(model, mesh, memory=4000, pins={"layers.*.up.weight": None, "layers.*.down.weight": None})
    fits = share_model(model, mesh, memory=0.51, pins={"layers.*.up.weight": 0, "layers.0.norm1.bias": None})
    held, whole = fits.functions["forward"].chosen.weights
    assert held <= 0.53 * whole


def test_a_search_of_a_model_says_what_it_takes():
    with pytest.raises(
        axe.TuneError, match=r"a Relax model has many functions: axe.compile\(model, mesh=mesh\) chooses"
    ):
        axe.search(models.encoder(1, 16, 4, 32, 8), axe.Mesh({"tp": 2}))

"""Inputs whose extents are multiples of a size, and resizing by sizes that aren't known: as PyTorch, on a mesh too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_dynamic_sequences import imported, one
from torch_modules import Called
from tvm import relax, tirx
from tvm.ir import IRModule

import tvm_axe as axe
from tvm_axe.relax.sizes import Extent

torch = pytest.importorskip("torch", reason="models are imported from PyTorch")
nn, F = torch.nn, torch.nn.functional


class Unet(nn.Module):
    """Two levels, which come together again: pictures' sides are multiples of four."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into, self.down, self.below = (
            nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, width), (width, 2 * width), (2 * width, 2 * width))
        )
        self.up, self.out = nn.Conv2d(4 * width, width, 3, padding=1), nn.Conv2d(2 * width, 4, 1)

    def forward(self, x: Any) -> Any:
        one = self.into(x).relu()
        two = self.down(F.max_pool2d(one, 2)).relu()
        three = F.interpolate(self.below(F.avg_pool2d(two, 2)), scale_factor=2.0)
        four = F.interpolate(self.up(torch.cat([three, two], 1)).relu(), size=one.shape[2:], mode="bilinear")
        return self.out(torch.cat([four, one], 1))


def sides() -> tuple[Any, Any]:
    return torch.export.Dim("h", min=2, max=40), torch.export.Dim("w", min=2, max=40)


def unet() -> tuple[Any, IRModule]:
    torch.manual_seed(0)
    model, (h, w) = Unet().eval(), sides()
    return model, imported(model, (torch.randn(2, 3, 16, 24),), ({2: 4 * h, 3: 4 * w},))


PICTURES = ((8, 8), (16, 24), (64, 36))


@torch.no_grad()
def test_pictures_of_any_size() -> None:
    model, made = unet()
    exe = axe.compile(made, work_dir=None)
    for size in PICTURES:
        x = torch.randn(2, 3, *size)
        np.testing.assert_allclose(one(exe(x.numpy())), model(x).numpy(), atol=1e-5)


@torch.no_grad()
def test_pictures_of_any_size_on_a_mesh(workers: Any) -> None:
    model, made = unet()
    with axe.compile(made, mesh=axe.Mesh({"tp": 2}), work_dir=None).load(workers(2)) as session:
        for size in PICTURES:
            x = torch.randn(2, 3, *size)
            np.testing.assert_allclose(one(session.main(x.numpy())), model(x).numpy(), atol=1e-5)


def halved() -> IRModule:
    half = torch.export.Dim("half", min=2, max=30)
    return imported(
        Called(lambda x, y: x[::2] + x[1::2] * y), (torch.randn(8, 3), torch.randn(1, 3)), (({0: 2 * half}, {}),)
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_no_multiple_is_refused(workers: Any, devices: int) -> None:
    mesh = axe.Mesh({"tp": devices}) if devices > 1 else None
    exe = axe.compile(halved(), mesh=mesh, work_dir=None)
    y, given = np.ones((1, 3), "float32"), [workers(devices)] if devices > 1 else []
    no_multiple = r"given_0 has 7 in dimension 0, which is 2 \* (\w+), at no \1; such are 6 and 8"
    with exe.load(*given) as session:
        for rows in (4, 10):
            x = np.random.default_rng(0).standard_normal((rows, 3)).astype("float32")
            np.testing.assert_allclose(one(exe(*given, x, y)), x[::2] + x[1::2], rtol=1e-6)
            np.testing.assert_allclose(one(session.main(x, y)), x[::2] + x[1::2], rtol=1e-6)
        for call in (lambda *arrays: exe(*given, *arrays), session.main):
            with pytest.raises(axe.InputError, match=no_multiple):
                call(np.zeros((7, 3), "float32"), y)
            with pytest.raises(
                axe.InputError, match=r"given_0 has the shape \(2 \* \w+, 3\); got an array of \(8, 4\)"
            ):
                call(np.zeros((8, 4), "float32"), y)
            with pytest.raises(axe.InputError, match=r"given_0 has the shape .*; got an array of \(8,\)"):
                call(np.zeros(8, "float32"), y)
            with pytest.raises(axe.InputError, match="given_0 is float32; got an array of float64"):
                call(np.zeros((8, 3)), y)
            with pytest.raises(axe.InputError, match="given_1"):
                call(np.zeros((8, 3), "float32"))
        if devices > 1:
            with pytest.raises(axe.InputError, match="is 62, and the model says that it is 60 at most"):
                session.main(np.zeros((62, 3), "float32"), y)


def of_extents(*shapes: Any) -> IRModule:
    """A function of numbers and of arrays, which are x0, x1 and so on, that returns each array's exponential."""
    builder = relax.BlockBuilder()
    arrays = [shape for shape in shapes if isinstance(shape, list)]
    tensors = [relax.Var(f"x{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(arrays)]
    params = [*(shape for shape in shapes if not isinstance(shape, list)), *tensors]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(relax.Tuple([builder.emit(relax.op.exp(each)) for each in tensors]))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize(
    ("extents", "right", "wrong", "message"),
    [
        (lambda n, m: ([n * 3 + 1],), (7,), (8,), r"x0 has 8 .* which is n \* 3 \+ 1, at no n; such are 7 and 10"),
        (lambda n, m: ([n * 3 + 4],), (4,), (1,), r"at no n; such are 4 and 7"),
        (lambda n, m: ([n * 2], [n * 3]), (4, 6), (4, 9), r"x1 has 9 .* n \* 3 = 6 \(n is 2 as in x0\)"),
        (lambda n, m: ([n * 2], [n * 2]), (4, 4), (4, 6), r"x1 has 6 .* n \* 2 = 4 \(n is 2 as in x0\)"),
        (lambda n, m: ([n * 2], [n]), (4, 2), (4, 3), r"x0 has 4 .* n \* 2 = 6 \(n is 3 as in x1\)"),
        (lambda n, m: ([n + m], [n], [m]), (5, 2, 3), (4, 2, 3), r"n \+ m = 5 \(.*n is 2 as in x1.*\)"),
        (lambda n, m: ([n * m], [n * 2], [m]), (6, 4, 3), (5, 4, 3), r"x0 has 5 .* n \* m = 6 .*n is 2 as in x1"),
        (lambda n, m: ([n * m], [n], [m]), (6, 2, 3), (5, 2, 3), r"n \* m = 6"),
    ],
    ids=["line", "less", "of one size", "the same", "another's", "sum", "product of one computed", "product"],
)
def test_extents_that_are_computed(
    workers: Any, extents: Any, right: Any, wrong: Any, message: str, tmp_path: Any
) -> None:
    """Also of what was saved."""
    model = of_extents(*extents(*(tirx.Var(name, "int64") for name in "nm")))
    exe = axe.compile(model, work_dir=None)
    exe.save(tmp_path / "exe")
    on_mesh = axe.compile(model, mesh=axe.Mesh({"tp": 2}), work_dir=None)
    calls = exe, axe.Executable.load(tmp_path / "exe"), lambda *arrays: on_mesh(workers(2), *arrays)
    for each in calls:
        found = each(*(np.zeros(count, "float32") for count in right))
        for array, count in zip(found if isinstance(found, tuple) else (found,), right, strict=True):
            np.testing.assert_array_equal(array, np.ones(count))
        with pytest.raises(axe.InputError, match=message):
            each(*(np.zeros(count, "float32") for count in wrong))


def test_a_number_is_a_size() -> None:
    n = tirx.Var("n", "int64")
    with axe.compile(of_extents(n, [n], [n * n]), work_dir=None).load({}) as session:
        arrays = [np.zeros(count, "float32") for count in (3, 9)]
        assert [each.shape for each in session.main(3, *arrays)] == [(3,), (9,)]
        with pytest.raises(axe.InputError, match="x0's dimension 0, n, is 3, and n is 2"):
            session.main(2, *arrays)
        with pytest.raises(axe.InputError, match=r"x1 has 4 in dimension 0, which is n \* n = 9 \(n is 3 as in n\)"):
            session.main(3, arrays[0], np.zeros(4, "float32"))


@pytest.mark.parametrize("devices", [1, 2])
def test_sizes_that_differ_are_refused(workers: Any, devices: int) -> None:
    rows = torch.export.Dim("rows", min=2, max=60)
    made = imported(Called(lambda x, y: x + y), (torch.randn(8, 3), torch.randn(8, 3)), (({0: rows}, {0: rows}),))
    mesh = axe.Mesh({"tp": devices}) if devices > 1 else None
    exe = axe.compile(made, mesh=mesh, work_dir=None)
    given = [np.ones((count, 3), "float32") for count in (7, 6)]
    match = r"given_1's dimension 0, \w+, is 6, and given_0's dimension 0 is 7"
    with pytest.raises(axe.InputError, match=match):
        exe(*([workers(devices)] if devices > 1 else []), *given)
    np.testing.assert_array_equal(one(exe(*([workers(devices)] if devices > 1 else []), given[0], given[0])), 2)


def test_a_size_that_no_call_says_is_refused() -> None:
    """Of a product of two nobody knows either."""
    n, m = (tirx.Var(name, "int64") for name in "nm")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([n * m, tirx.const(3, "int64")], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.exp(x))
        builder.emit_func_output(out)
    with pytest.raises(axe.InputError, match=r"parameter 'x' has the extent n \* m, and . isn't the extent of any"):
        axe.compile(builder.get(), work_dir=None)


RESIZED = {
    "nearest, doubled": lambda x: F.interpolate(x, scale_factor=2.0),
    "nearest, by half more": lambda x: F.interpolate(x, scale_factor=1.5),
    "nearest, of other sizes": lambda x: F.interpolate(x, size=(x.shape[2] + 3, x.shape[3] * 2)),
    "nearest, of known sizes": lambda x: F.interpolate(x, size=(7, 9)),
    "nearest in a row, doubled": lambda x: F.interpolate(x[0], scale_factor=2.0),
    "nearest in a row, by half more": lambda x: F.interpolate(x[0].double(), scale_factor=1.5),
    "nearest in a row, of another size": lambda x: F.interpolate(x[0], size=x.shape[3] + 3),
    "nearest in a row, of a known size": lambda x: F.interpolate(x[0], size=7),
    "nearest in a volume, doubled": lambda x: F.interpolate(x[None], scale_factor=2.0),
    "nearest in a volume, by half more": lambda x: F.interpolate(x[None].double(), scale_factor=1.5),
    "nearest in a volume, of another size": lambda x: F.interpolate(x[None], size=(5, x.shape[2] + 3, 11)),
    "nearest of all, by half more": lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
    "bilinear, doubled": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "bilinear, between corners": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True),
    "bilinear, one side known": lambda x: F.interpolate(x, size=(x.shape[2] + 3, 11), mode="bilinear"),
    "bilinear, to one column": lambda x: F.interpolate(
        x, size=(x.shape[2] + 3, 1), mode="bilinear", align_corners=True
    ),
    "linear": lambda x: F.interpolate(x[0], scale_factor=3.0, mode="linear"),
    "trilinear": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="trilinear"),
}


@pytest.mark.parametrize("form", RESIZED)
def test_resizing_by_sizes_that_are_not_known(form: str) -> None:
    h, w = sides()
    made = imported(Called(RESIZED[form]), (torch.randn(2, 3, 6, 10),), (({2: h, 3: w},),))
    exe = axe.compile(made, work_dir=None)
    for size in ((2, 2), (5, 7), (16, 9), (40, 40)):
        x = torch.randn(2, 3, *size)
        want = RESIZED[form](x).numpy()
        # Places are computed in float32: of 40 they are off by some 4e-6.
        np.testing.assert_allclose(one(exe(x.numpy())), want, atol=2e-5 if "linear" in form else 0, strict=True)


TENTHS = {
    "nearest": lambda x: F.interpolate(x, scale_factor=0.7),
    "nearest, of the sizes that come out": lambda x: F.interpolate(x, scale_factor=0.7, recompute_scale_factor=True),
    "bilinear, by two factors": lambda x: F.interpolate(x, scale_factor=(0.7, 1.3), mode="bilinear"),
    "there and on": lambda x: F.interpolate(F.interpolate(x, scale_factor=0.7), scale_factor=1.3),
}


@pytest.mark.parametrize("form, devices", [*((form, 1) for form in TENTHS), ("bilinear, by two factors", 2)])
def test_factors_that_floats_do_not_have(workers: Any, form: str, devices: int) -> None:
    """0.7 of a size isn't 7 tenths of it, rounded down, for every size: of 90 it is 62."""
    h, w = (torch.export.Dim(name, min=16, max=200) for name in "hw")
    made = imported(Called(TENTHS[form]), (torch.randn(2, 3, 20, 30),), (({2: h, 3: w},),))
    exe = axe.compile(made, mesh=axe.Mesh({"tp": devices}) if devices > 1 else None, work_dir=None)
    given = [workers(devices)] if devices > 1 else []
    for size in ((16, 16), (90, 33), (57, 180), (70, 30)):
        x = torch.randn(2, 3, *size)
        found = one(exe.run(*given, x.numpy()) if given else exe(x.numpy()))
        np.testing.assert_allclose(found, TENTHS[form](x).numpy(), atol=1e-4 if "linear" in form else 0, strict=True)


@pytest.mark.parametrize("factor", [0.7, 0.1, 1.3, 0.3, 1.1, 2.9])
def test_sizes_that_factors_make(factor: float) -> None:
    """Of every size they are what PyTorch computes in float64."""
    size = torch.export.Dim("n", min=64, max=1 << 20)
    called = Called(lambda x: F.interpolate(x, scale_factor=factor))
    made = imported(called, (torch.randn(1, 1, 400),), (({2: size},),))
    (extent,) = made["main"].ret_ty.fields[0].shape.values[2:]
    known = Extent.of(extent)
    assert [known.at({known.names[0]: n}) for n in range(64, 4096)] == [int(n * factor) for n in range(64, 4096)]


def test_other_roundings_are_refused() -> None:
    size = torch.export.Dim("n", min=64, max=4096)
    called = Called(lambda x: F.interpolate(x, size=round(x.shape[2] * 0.7)))
    with pytest.raises(
        axe.InputError, match=r"round.*: the size RoundToInt\(0\.7.* which round makes of s\d+; round a product .* down"
    ):
        imported(called, (torch.randn(1, 3, 400),), (({2: size},),))

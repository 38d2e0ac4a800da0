"""Weights that are constants of a model: how many bytes of them there are at once, counted and not measured."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.relax import constants as packing

TOKENS, WIDTH, HEADS = 32, 64, 2


class Layer(nn.Module):
    """Attention and a product behind it: on a CPU one is a tile kernel, and the other reads packed weights."""

    def __init__(self) -> None:
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.scale = nn.Parameter((WIDTH,))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        shape = (1, TOKENS, HEADS, WIDTH // HEADS)
        parts = [nn.op.reshape(part(x), shape) for part in (self.q, self.k, self.v)]
        return self.out(nn.op.reshape(nn.op.scaled_dot_product_attention(*parts), (TOKENS, WIDTH))) * self.scale


def aligned(array: np.ndarray) -> np.ndarray:
    """The array where a tensor may lie, too."""
    memory = np.empty(array.nbytes + 64, "uint8")
    skipped = -memory.ctypes.data % 64
    found = memory[skipped : skipped + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


def bound() -> tuple[tvm.IRModule, list[weakref.ref[np.ndarray]], int]:
    """A model, who tells whether its weights are there yet, and their bytes."""
    model, params = Layer().export_tvm({"forward": {"x": nn.spec.Tensor([TOKENS, WIDTH], "float32")}})
    rng = np.random.default_rng(0)
    arrays = {name: aligned(rng.standard_normal([*map(int, param.shape)]).astype("float32")) for name, param in params}
    tensors = {name: tvm.runtime.from_dlpack(array) for name, array in arrays.items()}
    names = {str(param.name).replace("_", "."): str(param.name) for param in model["forward"].params}
    given = {names[name.replace("_", ".")]: tensor for name, tensor in tensors.items()}
    return (
        relax.transform.BindParams("forward", given)(model),
        [weakref.ref(array) for array in arrays.values() if array.ndim == 2],
        sum(array.nbytes for array in arrays.values()),
    )


def constants(modules: Iterable[tvm.IRModule]) -> int:
    """The bytes of all constants of modules, of each memory once."""
    found: dict[int, int] = {}

    def on_constant(constant: GenericConst) -> None:
        array = np.from_dlpack(constant.value)
        found[array.ctypes.data] = math.prod(array.shape) * array.itemsize

    for module in modules:
        for _, func in module.functions_items():
            if isinstance(func, relax.Function):
                tvm_ffi.structural_walk(func.body, (GenericConst, on_constant))
    return sum(found.values())


def test_an_executable_has_each_constant_once() -> None:
    model, originals, nbytes = bound()
    exe = axe.compile(model, work_dir=None, keep=False)
    assert constants([exe.module, exe.runnable]) == nbytes
    # What was packed is a copy; the vector isn't, and is the caller's.
    assert constants([model, exe.module, exe.runnable]) == 2 * nbytes - 4 * WIDTH
    x = np.ones((TOKENS, WIDTH), "float32")
    with exe.load() as session:
        wanted = np.asarray(session.forward(x))
        # A caller who lets go of the model is left with one of each, in sessions, too.
        del model
        gc.collect()
        assert [each() for each in originals] == [None] * 4
        np.testing.assert_array_equal(np.asarray(session.forward(x)), wanted)


def test_weights_are_let_go_of_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the caller has let go of the model, what is packed isn't there twice, but for the weight at hand."""
    model, originals, _ = bound()
    given, left, pack = [model], [], packing._pack

    def counted(one: packing._Packing, built: tvm.runtime.Module) -> int:
        left.append(sum(each() is not None for each in originals))
        return pack(one, built)

    monkeypatch.setattr(packing, "_pack", counted)
    del model
    exe = axe.compile(given.pop(), work_dir=None, keep=False)
    assert left == [4, 3, 2, 1]
    assert [each() for each in originals] == [None] * 4
    assert np.isfinite(exe(np.ones((TOKENS, WIDTH), "float32"))).all()


def test_a_model_that_is_kept_is_as_it_was() -> None:
    model, originals, nbytes = bound()
    before = tvm_ffi.structural_hash(model)
    x = np.ones((TOKENS, WIDTH), "float32")
    first = axe.compile(model, work_dir=None, keep=False)(x)
    assert constants([model]) == nbytes and tvm_ffi.structural_hash(model) == before
    assert all(each() is not None for each in originals)
    np.testing.assert_array_equal(axe.compile(model, work_dir=None, keep=False)(x), first)


def test_a_saved_executable_has_each_constant_once(tmp_path: Path) -> None:
    model, _, nbytes = bound()
    axe.compile(model, work_dir=None, keep=False).save(tmp_path / "model.axe")
    exe = axe.Executable.load(tmp_path / "model.axe")
    assert constants([exe.module, exe.runnable]) == nbytes


@pytest.mark.parametrize("devices", [2, 3])
def test_a_mesh_has_no_copy_but_the_devices_shares(devices: int) -> None:
    model, originals, nbytes = bound()
    exe = axe.compile(model, mesh=axe.Mesh({"tp": devices}), work_dir=None, keep=False)
    held = {np.from_dlpack(tensor).ctypes.data for _, tensor in exe.shared.constants}
    assert constants([model]) == nbytes
    assert {each().ctypes.data for each in originals} <= held  # type: ignore[union-attr]
    with axe.launch(exe.mesh, engine="threads") as workers, exe.load(workers, {}) as session:
        x = np.random.default_rng(1).standard_normal((TOKENS, WIDTH)).astype("float32")
        wanted = axe.compile(model, work_dir=None, keep=False)(x)
        np.testing.assert_allclose(np.asarray(session.forward(x)), wanted, rtol=1e-4, atol=1e-3)

"""Shared libraries of compiled tile programs, called from C++."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import InputError, TileError
from tvm_axe.machines.cache import Cache

ROWS, COLUMNS = 32, 48

CALLER = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cstdio>

using tvm::ffi::Module;

int main(int argc, char** argv) {
  Module library = Module::LoadFromFile(argv[1]);
  tvm::ffi::Function scale = library->GetFunction("scale").value();
  alignas(64) static float x[ROWS * COLUMNS], y[ROWS * COLUMNS];
  for (int i = 0; i < ROWS * COLUMNS; ++i) x[i] = i % 1000;
  int64_t shape[2] = {ROWS, COLUMNS}, wrong[2] = {ROWS, COLUMNS + 1};
  DLTensor a{x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 0};
  DLTensor b{y, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 0};
  scale(&a, 2.5, &b);
  for (int i = 0; i < ROWS * COLUMNS; ++i)
    if (y[i] != 2.5f * (i % 1000)) return 3;
  b.shape = wrong;
  try {
    scale(&a, 2.5, &b);
  } catch (const tvm::ffi::Error& error) {
    std::printf("refused: %s\\n", error.message().c_str());
    return 0;
  }
  return 4;
}
"""


@T.prim_func
def scale(X: T.Buffer((ROWS, COLUMNS), "float32"), s: T.float32, Y: T.Buffer((ROWS, COLUMNS), "float32")):
    with tile.kernel(2) as i:
        rows = tile.fragment((16, 48), "float32")
        tile.copy(X[i * 16, 0], rows)
        with tile.parallel(16, 48) as (a, b):
            rows[a, b] = rows[a, b] * s
        tile.copy(rows, Y[i * 16, 0])


@T.prim_func
def through_scratch(X: T.Buffer((ROWS, COLUMNS), "float32"), s: T.float32, Y: T.Buffer((ROWS, COLUMNS), "float32")):
    """The same by two kernels, with what one leaves for the other in global memory."""
    half = tile.scratch((ROWS, COLUMNS), "float32")
    with tile.kernel(ROWS) as i, tile.parallel(COLUMNS) as j:
        half[i, j] = X[i, j] * 0.5
    with tile.kernel(ROWS) as i, tile.parallel(COLUMNS) as j:
        Y[i, j] = half[i, j] * (s * 2.0)


SCALES = {"one kernel": scale, "several": through_scratch.with_attr("global_symbol", "scale")}


@pytest.fixture
def linker() -> str:
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler is here to link with")
    return found


@pytest.mark.parametrize("kernels", SCALES)
def test_called_from_cpp(kernels: str, tmp_path: Path, linker: str) -> None:
    tile.compile(SCALES[kernels], "llvm", Cache(tmp_path / "cache")).export(tmp_path / "scale.so")
    code, program = tmp_path / "caller.cc", tmp_path / "caller"
    code.write_text(CALLER)
    ffi, runtime = Path(tvm_ffi.libinfo.find_libtvm_ffi()), Path(tvm.__file__).parent / "lib/libtvm_runtime.so"
    includes = {tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()}
    command = [linker, "-std=c++17", f"-DROWS={ROWS}", f"-DCOLUMNS={COLUMNS}", *(f"-I{folder}" for folder in includes)]
    command += [str(code), "-Wl,--no-as-needed", str(ffi), str(runtime), "-o", str(program)]
    command += [f"-Wl,-rpath,{library.parent}" for library in (ffi, runtime)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program), str(tmp_path / "scale.so")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "refused: " in done.stdout and "Y" in done.stdout


def test_loaded_by_the_runtime(tmp_path: Path, linker: str) -> None:
    tile.compile(scale, "llvm", Cache(tmp_path / "cache")).export(tmp_path / "scale.so")
    x = np.random.default_rng().standard_normal((ROWS, COLUMNS)).astype("float32")
    given, found = tvm.runtime.tensor(x), tvm.runtime.tensor(np.full_like(x, np.nan))
    tvm.runtime.load_module(str(tmp_path / "scale.so"))["scale"](given, 3.0, found)
    np.testing.assert_array_equal(found.numpy(), x * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", SCALES)
def test_called_on_a_gpu(kernels: str, cuda: object, tmp_path: Path, linker: str) -> None:
    tile.compile(SCALES[kernels], "cuda", Cache(tmp_path / "cache")).export(tmp_path / "scale.so")
    x = np.random.default_rng().standard_normal((ROWS, COLUMNS)).astype("float32")
    given, found = tvm.runtime.tensor(x, cuda), tvm.runtime.tensor(np.full_like(x, np.nan), cuda)
    tvm.runtime.load_module(str(tmp_path / "scale.so"))["scale"](given, 3.0, found)
    np.testing.assert_array_equal(found.numpy(), x * 3)


def test_without_the_runtime_of_a_gpu_there_is_no_binary_to_export(tmp_path: Path) -> None:
    if tvm.runtime.device("cuda").exist:
        pytest.skip("a GPU is here, where kernels are exported")
    try:
        exe = tile.compile(scale, "cuda:sm_90a", Cache(tmp_path / "cache"))
    except TileError as error:
        pytest.skip(str(error))
    with pytest.raises(InputError, match=r"for sm_90a is exported where such a GPU is"):
        exe.export(tmp_path / "scale.so")


def test_what_is_refused(tmp_path: Path, linker: str) -> None:
    exe = tile.compile(scale, "llvm", Cache(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"scale\.txt is no name of a shared library, which ends in \.so"):
        exe.export(tmp_path / "scale.txt")
    with pytest.raises(InputError, match="there is no folder"):
        exe.export(tmp_path / "nowhere" / "scale.so")

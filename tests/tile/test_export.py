"""Shared libraries of compiled tile programs, called from C."""

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
#include <stdio.h>
#include <stdlib.h>
#include <dlfcn.h>
#include <tvm/ffi/c_api.h>

static float x[ROWS * COLUMNS], y[ROWS * COLUMNS];

static TVMFFIAny tensor(DLTensor* t, void* data, int64_t* shape) {
  TVMFFIAny any = {0};
  *t = (DLTensor){.data = data, .device = {kDLCPU, 0}, .ndim = 2, .dtype = {kDLFloat, 32, 1}, .shape = shape};
  any.type_index = kTVMFFIDLTensorPtr;
  any.v_ptr = t;
  return any;
}

int main(int argc, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) { fprintf(stderr, "%s\\n", dlerror()); return 1; }
  TVMFFISafeCallType scale = (TVMFFISafeCallType)dlsym(library, "__tvm_ffi_scale");
  int64_t shape[2] = {ROWS, COLUMNS}, wrong[2] = {ROWS, COLUMNS + 1};
  DLTensor a, b;
  TVMFFIAny result = {0}, arguments[3] = {0};
  for (int i = 0; i < ROWS * COLUMNS; ++i) x[i] = i % 1000;
  arguments[0] = tensor(&a, x, shape);
  arguments[1].type_index = kTVMFFIFloat;
  arguments[1].v_float64 = 2.5;
  arguments[2] = tensor(&b, y, shape);
  if (scale(0, arguments, 3, &result)) return 2;
  for (int i = 0; i < ROWS * COLUMNS; ++i) if (y[i] != 2.5f * (i % 1000)) return 3;
  arguments[2] = tensor(&b, y, wrong);
  return scale(0, arguments, 3, &result) ? 0 : 4;  /* is refused */
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


@pytest.fixture
def linker() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler is here to link with")
    return found


def test_called_from_c(tmp_path: Path, linker: str) -> None:
    tile.compile(scale, "llvm", Cache(tmp_path / "cache")).export(tmp_path / "scale.so")
    code, program = tmp_path / "caller.c", tmp_path / "caller"
    code.write_text(CALLER)
    ffi = Path(tvm_ffi.libinfo.find_libtvm_ffi())
    includes = {tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()}
    command = [linker, f"-DROWS={ROWS}", f"-DCOLUMNS={COLUMNS}", *(f"-I{folder}" for folder in includes), str(code)]
    command += ["-Wl,--no-as-needed", str(ffi), f"-Wl,-rpath,{ffi.parent}", "-ldl", "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program), str(tmp_path / "scale.so")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_loaded_by_the_runtime(tmp_path: Path, linker: str) -> None:
    tile.compile(scale, "llvm", Cache(tmp_path / "cache")).export(tmp_path / "scale.so")
    x = np.random.default_rng().standard_normal((ROWS, COLUMNS)).astype("float32")
    given, found = tvm.runtime.tensor(x), tvm.runtime.tensor(np.full_like(x, np.nan))
    tvm.runtime.load_module(str(tmp_path / "scale.so"))["scale"](given, 3.0, found)
    np.testing.assert_array_equal(found.numpy(), x * 3)


@pytest.mark.gpu
def test_called_on_a_gpu(cuda: object, tmp_path: Path, linker: str) -> None:
    tile.compile(scale, "cuda", Cache(tmp_path / "cache")).export(tmp_path / "scale.so")
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

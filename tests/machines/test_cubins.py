"""What a cubin says of its kernels, beside what nvcc prints."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tvm_axe.errors import TileError
from tvm_axe.machines import cubins, nvcc

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(256) plain(float* x, int n) {
  int i = threadIdx.x + blockIdx.x * 256;
  if (i < n) x[i] *= 2;
}
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x, const float* y, int n) {
  float a[96];
  #pragma unroll
  for (int j = 0; j < 96; ++j) a[j] = y[threadIdx.x + j * 1024];
  for (int t = 0; t < n; ++t) {
    #pragma unroll
    for (int j = 0; j < 96; ++j) a[j] = a[j] * a[(j * 7 + 1) % 96] + x[j];
  }
  float r = 0;
  #pragma unroll
  for (int j = 0; j < 96; ++j) r += a[j];
  x[threadIdx.x] = r;
}
"""


def test_registers_and_local_memory_are_what_nvcc_prints(tmp_path: Path) -> None:
    try:
        compiler = nvcc.find_compiler()
    except TileError as error:
        pytest.skip(str(error))
    if compiler.path is None:
        pytest.skip("nvcc, which prints what a kernel takes, isn't here: nvrtc alone is")
    code, binary = tmp_path / "k.cu", tmp_path / "k.cubin"
    code.write_text(SOURCE)
    command = [compiler.path, "-cubin", "-O3", "-arch=sm_90a", "--resource-usage", "-o", str(binary), str(code)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    expected, name = {}, ""
    for line in (told.stdout + told.stderr).splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name, frame = entry[1], 0
        if stack := re.search(r"(\d+) bytes stack frame", line):
            frame = int(stack[1])
        if used := re.search(r"Used (\d+) registers", line):
            expected[name] = cubins.Resources(int(used[1]), frame)
    found = cubins.resources(binary.read_bytes())
    assert found == expected
    assert set(found) == {"plain", "spills"}
    assert found["spills"].local_bytes > 0 == found["plain"].local_bytes

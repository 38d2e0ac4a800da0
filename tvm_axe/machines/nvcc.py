"""CUDA source to cubin, by nvcc or nvrtc, whichever is there; needs no GPU.

The flags are upstream's, so that a kernel runs as fast as one that upstream compiles when it is first launched.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TileError, TuneError
from tvm_axe.machines import cache
from tvm_axe.machines.target import architecture

_HOMES = ("CUDA_HOME", "CUDA_PATH")
_USUAL_HOME = "/usr/local/cuda"
_FLAGS = (
    "-cubin",
    "-O3",
    *(f"-U__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF_CONVERSIONS")),
    *(f"-U__CUDA_NO_BFLOAT16{two}_{what}__" for two in ("", "2") for what in ("OPERATORS", "CONVERSIONS")),
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--use_fast_math",
    "--ptxas-options=--register-usage-level=10",
)
_REMARK = re.compile(r"\((C\d+)\) Potential Performance Loss: (.*?) in the function '(\w+)'")


@dataclass(frozen=True)
class Compiler:
    """nvcc, with the program's path, or nvrtc, without; and all that it says of its version."""

    path: str | None
    version: str


def cubin(source: str, target: Target, store: cache.Cache) -> bytes:
    """The binary of CUDA source for a target's architecture; from `store` if it was compiled before.

    Raises
    ------
    TileError
        There is neither nvcc nor nvrtc, or nvrtc without the toolkit's headers.
    TuneError
        The compiler knows no such architecture.
    """
    compiler = find_compiler()
    arch = architecture(target)

    def compile_it() -> bytes:
        if compiler.path is None:
            return _nvrtc(source, arch)
        binary, said = _nvcc(compiler.path, source, arch)
        if _REMARK.search(said):
            store.put(_name("remarks", source, arch, compiler), said.encode())
        return binary

    return store.get_or_make(_name("cubin", source, arch, compiler), compile_it)


def remarks(source: str, target: Target, store: cache.Cache) -> dict[str, list[str]]:
    """What the assembler expects to be slow in CUDA source that `cubin` has compiled, by the kernel's name.

    nvrtc doesn't say it.
    """
    kept = store.get(_name("remarks", source, architecture(target), find_compiler()))
    found: dict[str, list[str]] = {}
    for code, what, name in _REMARK.findall(kept.decode()) if kept is not None else ():
        found.setdefault(name, []).append(f"{' '.join(what.split())} (ptxas, {code})")
    return found


def _name(what: str, source: str, arch: str, compiler: Compiler) -> str:
    """The name under which something that a compiler has made of source is kept."""
    return cache.key(what, source, arch, "nvrtc" if compiler.path is None else "nvcc", compiler.version, *_FLAGS)


@functools.cache
def find_compiler() -> Compiler:
    """The compiler for CUDA source that this machine has, nvcc before nvrtc.

    Raises
    ------
    TileError
        It has none.
    """
    homes = [*(os.environ[name] for name in _HOMES if os.environ.get(name)), _USUAL_HOME]
    path = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(f"{home}/bin" for home in homes))
    if path is not None:
        return Compiler(path, subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout)
    version = _tvm.nvrtc_version()
    if version is not None:
        return Compiler(None, version)
    raise TileError(
        "CUDA kernels are compiled by nvcc or nvrtc, and this machine has neither: there is no nvcc on PATH or in "
        f"{', '.join(homes)}, and no cuda-bindings that finds its library; install the CUDA toolkit, or tvm-axe[cuda] "
        "and the toolkit's headers"
    )


def _nvrtc(source: str, arch: str) -> bytes:
    try:
        return _tvm.nvrtc_cubin(source, arch)
    except RuntimeError as error:
        if "invalid value for --gpu-architecture" in str(error):
            raise _unknown(arch, "nvrtc") from error
        if not str(error).startswith("Cannot find CUDA"):
            raise
        raise TileError(
            f"nvrtc needs the CUDA toolkit's headers: {error}; set CUDA_PATH to the folder whose include/ has "
            "cuda_runtime.h"
        ) from error


def _unknown(arch: str, compiler: str) -> TuneError:
    """The error of an architecture that a compiler doesn't know."""
    return TuneError(
        f"target: {compiler} knows no GPU architecture {arch}; valid is one that it has, such as cuda:sm_90a "
        "(nvcc --list-gpu-code prints them), or a newer CUDA toolkit"
    )


def _nvcc(path: str, source: str, arch: str) -> tuple[bytes, str]:
    """The binary, and what the compiler said."""
    with tempfile.TemporaryDirectory() as folder:
        code, binary = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        code.write_text(source, encoding="utf-8")
        generate = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
        done = subprocess.run([path, *_FLAGS, generate, "-o", binary, code], capture_output=True, text=True)
        if done.returncode != 0:
            if "Unsupported gpu architecture" in done.stderr:
                raise _unknown(arch, path)
            raise RuntimeError(f"nvcc refuses generated code for {arch}:\n{done.stderr}")
        return binary.read_bytes(), done.stdout + done.stderr

"""What LLVM makes of functions for a CPU: bitcode, and modules of it; and the options that it needs to be right.

LLVM's options are the whole process's. Upstream sets a target's for as long as code is made for it, and also whenever a
function of such code is looked up, and sets them back; of two threads that do so at once one stops at a failed check,
or has its code made without the options. So one thread at a time compiles with options, and what is compiled doesn't
name them any more: they have been heeded when bitcode is made.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading

import tvm
import tvm_ffi
from tvm import runtime
from tvm.ir import IRModule
from tvm.target import Target

_CHECKED = ("-vectorize-scev-check-threshold:uint=0", "-max-interleave-group-factor:uint=1")
"""What LLVM's loop vectorizer is told: no loop is taken that is right only if numbers don't wrap.

LLVM 22 leaves the check of that out where it would fail, and where another of wider numbers is made
(llvm/llvm-project 225086, 118184), so that of a loop over ``i`` with ``i % 4`` in an index vectors read on at ``i``.
The first option refuses such a loop; where groups of strided accesses or a cost need one later, nothing asks again,
so that there are no groups. Vectors that a schedule asks for are no matter of LLVM's.
"""
_NAMED = json.dumps(_CHECKED, separators=(",", ":"))[1:-1].encode()  # as they end a list in a module's target

_compiling = threading.RLock()


def _after_fork() -> None:
    """In a child that this process forked: whoever compiled isn't there."""
    global _compiling
    _compiling = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _rightly_vectorized(target: Target) -> Target:
    """A target of LLVM's, with the options that its vectorizer has to be right with."""
    config = dict(target.export())
    return Target({**config, "cl-opt": [*config.get("cl-opt", ()), *_CHECKED]})


def compile_llvm(mod: IRModule, target: Target, pipeline: str = "default") -> bytes:
    """Functions compiled for a CPU by a pipeline of upstream's or ours: LLVM bitcode, optimised, for `load_llvm`."""
    with _compiling, tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "module.bc")
        tvm.compile(mod, target=_rightly_vectorized(target), tir_pipeline=pipeline).mod.write_to_file(path, "bc")
        with open(path, "rb") as file:
            return _without_options(file.read())


def _without_options(bitcode: bytes) -> bytes:
    """The same bitcode, whose target doesn't name `_CHECKED`; a target's own options stay.

    Strings of metadata stand in bitcode as they are (LLVM's bitcode format, METADATA_STRINGS) while their lengths stand
    elsewhere, so that blanks take the options' place.
    """
    if bitcode.count(_NAMED) != 1:
        raise RuntimeError("LLVM bitcode doesn't name the options that it was compiled with once, as a string")
    begin = bitcode.index(_NAMED)
    end = begin + len(_NAMED)
    if bitcode[begin - 1 : begin] == b",":
        begin -= 1
    return bitcode[:begin] + b" " * (end - begin) + bitcode[end:]


def load_llvm(bitcode: bytes) -> runtime.Module:
    """What `compile_llvm` made, to be run; code is made of it when the first of its functions is looked up."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "module.bc")
        with open(path, "wb") as file:
            file.write(bitcode)
        return tvm_ffi.get_global_func("ffi.Module.load_from_file.ll")(path, "ll")

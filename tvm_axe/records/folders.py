"""Where databases lie: ``<target>/<workload>/`` in a work directory, in names that a person can read.

A folder's name ends with the beginning of the workload's hash, by which it is found again whatever the function is
called the next time:

    tuning_logs/local/llvm-znver5-2cores/matmul-1024x1024x1024-1a2b3c4d/
"""

from __future__ import annotations

import hashlib
import json
import re
from math import prod
from pathlib import Path

from tvm import s_tir
from tvm.ir import IRModule
from tvm.target import Target
from tvm.tirx import IntImm

from tvm_axe import _tvm
from tvm_axe.machines.target import resolve_target
from tvm_axe.records.files import locked

__all__ = ["MESH", "folder_for", "largest_block", "target_name", "workload_name", "workload_suffix"]

MESH = "axe.mesh"
"""Attribute of a distributed program's workload: the mesh that its schedules are for."""

_DIGITS = 8  # of the hash; a folder that two workloads came to share would still be a valid database
_LONGEST = 40  # characters of a function's name, and of its extents


def folder_for(work_dir: str | Path, target: Target, name: str, mod: IRModule) -> Path:
    """The folder of a workload's database; made if needed.

    Parameters
    ----------
    work_dir
        Where databases are kept, such as `tvm_axe.defaults.WORK_DIR`.
    target
        A resolved target.
    name
        What to call a new folder after; one that is there for the same workload keeps its name.
    mod
        A normalised workload.

    Raises
    ------
    TuneError
        If `work_dir` cannot be used.
    """
    parent = Path(work_dir) / target_name(target)
    suffix = workload_suffix(_tvm.workload_hash(mod))
    with locked(parent):
        there = sorted(parent.glob(f"*{suffix}"))
        folder = there[0] if there else parent / workload_name(name, mod)
        folder.mkdir(exist_ok=True)
    return folder


def workload_name(name: str, mod: IRModule) -> str:
    """What a workload's folder is called: the function's name, a program's mesh, extents, the beginning of the hash.

    The extents are those of the iterators of the block with the most work, without ones: M x N x K of a matmul.
    """
    mesh = mod["main"].attrs.get(MESH) if mod["main"].attrs else None
    extents = "x".join(map(str, largest_block(mod)[1]))[:_LONGEST]
    words = [_plain(name), *([_plain(str(mesh))] if mesh else []), *([extents] if extents else [])]
    return "-".join(words) + workload_suffix(_tvm.workload_hash(mod))


def workload_suffix(digest: str) -> str:
    """What the folder's name of the workload with this hash ends with."""
    return f"-{int(digest):016x}"[: 1 + _DIGITS]


def target_name(target: Target) -> str:
    """The folder of a resolved target: its kind, model and cores; all else that sets it apart as a short hash.

    Examples
    --------
    >>> target_name(Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}))
    'llvm-x86-64-v3-2cores'
    """
    config = json.loads(str(target))
    kind = config["kind"]
    told = {key: config[key] for key in ("kind", "mcpu", "arch", "num-cores") if key in config}
    words = [str(kind), *(str(told[key]) for key in ("mcpu", "arch") if key in told)]
    if "num-cores" in told:
        words.append(f"{told['num-cores']}core{'s' if told['num-cores'] != 1 else ''}")
    # What follows from the rest says nothing.
    if config != json.loads(str(resolve_target(told))):
        words.append(hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:_DIGITS])
    return "-".join(_plain(word) for word in words)


def largest_block(mod: IRModule) -> tuple[str, list[int]]:
    """The name of the block with the most work, and its iterators' extents without ones; symbolic ones count as one."""
    sch = s_tir.Schedule(mod)
    blocks = [sch.get(block) for block in sch.get_child_blocks(sch.get_sblock("root"))]
    sizes = [[int(n) for it in block.iter_vars if isinstance(n := it.dom.extent, IntImm)] for block in blocks]
    named = [(str(block.name_hint), [n for n in extents if n != 1]) for block, extents in zip(blocks, sizes)]
    return max(named, key=lambda one: prod(one[1]), default=("main", []))


def _plain(name: str) -> str:
    """The name with nothing in it that a shell or a file system could mind."""
    return re.sub(r"[^A-Za-z0-9_.,=-]+", "_", name).strip("._-")[:_LONGEST] or "unnamed"

"""Targets with everything in them that a kernel depends on: the CPU's model and the number of cores, the GPU's arch."""

from __future__ import annotations

import functools
import json
import os
from typing import TYPE_CHECKING, Any

import tvm
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.machines.machine import Cpu, Gpu
from tvm_axe.machines.registry import machine_of

if TYPE_CHECKING:
    from tvm_axe.layout import Mesh

__all__ = [
    "architecture",
    "architecture_of",
    "as_given",
    "completed",
    "cores",
    "cores_per_device",
    "gpu_arch",
    "host_cpu",
    "resolve_target",
    "runs_on",
    "vector_bits",
    "vector_registers",
]

# LLVM's names of the features that the kernels are written for, and the kernel's names in /proc/cpuinfo. A CPU model
# implies them, but a hypervisor may have taken them away, and code that uses them then dies with SIGILL.
_FLAGS = {"avx2": "avx2", "fma": "fma", "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512vl": "avx512vl"}
_NO_GPU = "sm_90a"  # what "cuda" is for on a machine without a GPU
# What upstream's design spaces ask a GPU's target for: threads, static shared memory and registers of a block, the same
# for every architecture.
_CUDA_LIMITS = {
    "max_threads_per_block": Gpu.block_threads,
    "max_shared_memory_per_block": 48 << 10,
    "registers_per_block": Gpu.registers,
}
_VALID = (
    '"llvm" for this machine\'s CPU, "cuda" for its GPU, "cuda:sm_90a" or "rocm:gfx942" for one that need not be here, '
    "a target's JSON, and tvm.target.Target"
)
_GENERIC = ("x86-64-v4", "x86-64-v3", "x86-64-v2")


def resolve_target(target: str | dict[str, Any] | Target, threads: int | None = None) -> Target:
    """A target in which the CPU's model and the number of cores, or the GPU's architecture, are explicit.

    Records of tuning hold for one such target, so every compilation that wants to find them resolves its target here.
    What `target` says already is kept, so that resolving twice changes nothing; "llvm" and "cuda" are completed.

    Parameters
    ----------
    target
        A kind such as ``"llvm"``, a JSON object as text, a dict, or a ``Target``. ``"cuda:sm_80"`` names a GPU's
        architecture, as does ``"rocm:gfx942"``; ``"cuda"`` without one is for this machine's GPU, or for Hopper
        (sm_90a) where there is none.
    threads
        Number of threads a kernel may use, where `target` has no ``num-cores``; the cores that this process may run
        on if None.

    Raises
    ------
    TuneError
        If `target` isn't one; `threads` is not positive, or differs from the target's own ``num-cores``; or LLVM
        doesn't know the target's ``mcpu`` (it would silently compile for a generic CPU).

    Examples
    --------
    >>> str(resolve_target({"kind": "llvm", "mcpu": "x86-64-v3"}, threads=2).attrs["mcpu"])
    'x86-64-v3'
    """
    if threads is not None and threads < 1:
        raise TuneError(f"threads: a kernel runs on at least one thread, not on {threads}")
    given = as_given(target)
    if given == {"kind": "cuda"}:  # upstream would say sm_50 where it sees no GPU
        given["arch"] = gpu_arch() or _NO_GPU
    resolved = Target(given)
    config: dict[str, Any] = dict(resolved.export())
    if resolved.kind.name == "cuda":
        return Target(_CUDA_LIMITS | config)
    if resolved.kind.name != "llvm":
        return resolved
    if config.get("mtriple") == _tvm.host_triple():
        del config["mtriple"]  # upstream adds the host's where there is no mcpu: one spelling for one target
    if "mcpu" not in config and "mtriple" not in config:
        config["mcpu"] = host_cpu()
    if "mcpu" in config and not _tvm.is_valid_cpu(config["mcpu"], config.get("mtriple", _tvm.host_triple())):
        raise TuneError(f"target: LLVM knows no mcpu {config['mcpu']!r}; this host is {host_cpu()!r}")
    own = config.setdefault("num-cores", threads or len(os.sched_getaffinity(0)))
    if threads is not None and int(own) != threads:
        raise TuneError(f"threads: {threads} were asked for, but the target says num-cores {own}; give one of the two")
    return Target(config)


def as_given(target: str | dict[str, Any] | Target) -> dict[str, Any]:
    """A target as `resolve_target` takes it, as JSON has it; nothing of this machine comes to it.

    Raises
    ------
    TuneError
        If it isn't one.

    Examples
    --------
    >>> as_given("llvm"), as_given("cuda:sm_80")
    ({'kind': 'llvm'}, {'kind': 'cuda', 'arch': 'sm_80'})
    """
    try:
        if isinstance(target, Target):
            return dict(target.export())
        if isinstance(target, str) and target.lstrip().startswith("{"):
            target = json.loads(target)
        elif isinstance(target, str) and target.startswith("cuda:"):
            target = {"kind": "cuda", "arch": target.removeprefix("cuda:")}
        elif isinstance(target, str) and target.startswith("rocm:"):
            target = {"kind": "rocm", "mcpu": target.removeprefix("rocm:")}
        elif isinstance(target, str) and target in Target.list_kinds():
            target = {"kind": target}
        if target == {"kind": "cuda"}:  # where there is no GPU, upstream warns that it takes sm_50
            return dict(target)
        found = Target(target)  # which refuses what is none
        return dict(target) if isinstance(target, dict) else dict(found.export())
    except (ValueError, TypeError) as error:  # JSON's errors are ValueErrors too
        why = str(error).partition(" Target creation from")[0].rstrip(". ")  # upstream repeats what was given
        raise TuneError(f"target: {target!r} names no target: {why}; valid are {_VALID}") from error


@functools.cache
def host_cpu() -> str:
    """LLVM's name of this host's CPU, or the best generic level whose vector instructions it really has."""
    flags = _cpuinfo_flags()
    for name in (_tvm.system_cpu(), *_GENERIC):
        if not _tvm.is_valid_cpu(name, _tvm.host_triple()):
            continue
        has = _tvm.cpu_features(Target({"kind": "llvm", "mcpu": name}))
        if flags is None or all(flags.issuperset({flag}) for feature, flag in _FLAGS.items() if feature in has):
            return name
    return "generic"


def runs_on(wanted: str, cpu: str) -> bool:
    """Whether code for a CPU is what one runs on another: on the same, or on any that has all of a generic level.

    Parameters
    ----------
    wanted, cpu
        LLVM's names. Code for one model runs on some others, but is no measure of what is fast there.
    """
    if wanted == cpu:
        return True
    if wanted not in (*_GENERIC, "generic", "x86-64") or not _tvm.is_valid_cpu(cpu, _tvm.host_triple()):
        return False
    needed, there = (_tvm.cpu_features(Target({"kind": "llvm", "mcpu": name})) for name in (wanted, cpu))
    return needed & _FLAGS.keys() <= there  # the rest of LLVM's features say what is slow on a CPU, too


def gpu_arch() -> str | None:
    """The architecture of this machine's first GPU, with the instructions of it alone where it has such; else None."""
    return architecture_of(tvm.cuda())


def architecture_of(device: Any) -> str | None:
    """The architecture of a GPU, of this machine or one that is reached by RPC; None if it isn't there."""
    if not device.exist:
        return None
    major, minor = str(device.compute_version).split(".")
    return f"sm_{major}{minor}" + ("a" if int(major) >= 9 else "")


def completed(given: dict[str, Any], cpu: str, gpu: str) -> dict[str, Any]:
    """A target as it was given, with what it leaves out of another machine's CPU or GPU; empty names say nothing.

    Raises
    ------
    TuneError
        If it leaves out how many of that machine's cores there are to use.
    """
    kind = given.get("kind")
    if kind == "cuda":
        return {**given, "arch": given.get("arch", gpu or _NO_GPU)}
    if kind != "llvm":
        return given
    if "num-cores" not in given:
        raise TuneError(
            "target: nothing says how many cores that machine has; name them, for example "
            '{"kind": "llvm", "mcpu": "znver4", "num-cores": 8}'
        )
    return given if "mcpu" in given or not cpu else {**given, "mcpu": cpu}


def architecture(target: Target) -> str:
    """The architecture that a GPU's target says to compile for, such as ``"sm_90a"``."""
    return str(target.attrs["arch"])


def _cpuinfo_flags() -> frozenset[str] | None:
    """The instruction sets that the running system offers, or None where it doesn't say (any CPU but x86)."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = next((line for line in lines if line.startswith("flags")), None)
    except OSError:
        return None
    return None if found is None else frozenset(found.partition(":")[2].split())


def cores(target: Target) -> int:
    """Number of threads of the host that a kernel of this (resolved) target may use."""
    machine = machine_of(target)
    return machine.processors if isinstance(machine, Cpu) else 1


def cores_per_device(mesh: Mesh) -> int:
    """Cores of this machine that each device of `mesh` computes with."""
    return max(1, len(os.sched_getaffinity(0)) // mesh.size)


def vector_bits(target: Target) -> int:
    """The most bits that an instruction loads: the width of a CPU's vector registers."""
    return machine_of(target).vector_bits


def vector_registers(target: Target) -> int:
    """Number of architectural vector registers of a CPU."""
    machine = machine_of(target)
    assert isinstance(machine, Cpu), machine
    return machine.vector_registers

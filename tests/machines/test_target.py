"""Targets are completed, kept, and checked."""

from __future__ import annotations

import json
import os

import pytest
from tvm.target import Target

from tvm_axe.errors import TuneError
from tvm_axe.machines import target as targets
from tvm_axe.machines.target import resolve_target


def test_llvm_gets_the_hosts_cpu_and_cores():
    resolved = resolve_target("llvm")
    assert resolved.attrs["mcpu"] == targets.host_cpu()
    assert targets.cores(resolved) == len(os.sched_getaffinity(0))
    assert targets.cores(resolve_target("llvm", threads=3)) == 3


def test_what_is_said_is_kept_and_resolving_twice_changes_nothing():
    given = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 5}
    for spelling in (given, json.dumps(given), Target(given)):
        once = resolve_target(spelling)
        assert once.attrs["mcpu"] == "x86-64-v3"
        assert targets.cores(once) == 5
        assert str(resolve_target(once)) == str(once)
    assert str(resolve_target(resolve_target("llvm"))) == str(resolve_target("llvm"))


def test_other_kinds_pass_through():
    assert str(resolve_target("c")) == str(Target("c"))


def test_a_foreign_triple_gets_no_host_cpu():
    assert "mcpu" not in resolve_target({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}).attrs


@pytest.mark.parametrize(
    ("given", "threads", "message"),
    [
        ("llvm", 0, "threads: a kernel runs on at least one thread, not on 0"),
        ({"kind": "llvm", "num-cores": 2}, 3, "threads: 3 were asked for, but the target says num-cores 2"),
        ({"kind": "llvm", "mcpu": "z80"}, None, "target: LLVM knows no mcpu 'z80'"),
    ],
)
def test_bad_input_is_refused(given, threads, message):
    with pytest.raises(TuneError, match=message):
        resolve_target(given, threads)


@pytest.mark.parametrize(("flags", "level"), [("avx2 fma", "x86-64-v3"), ("sse4_2", "x86-64-v2")])
def test_instructions_that_the_system_hides_are_not_used(monkeypatch, flags, level):
    """A model name implies AVX-512; a hypervisor that masks it would make such code die with SIGILL."""
    monkeypatch.setattr(targets._tvm, "system_cpu", lambda: "znver4")
    monkeypatch.setattr(targets, "_cpuinfo_flags", lambda: frozenset(flags.split()))
    assert targets.host_cpu.__wrapped__() == level


def test_registers_follow_the_features():
    assert [targets.vector_bits(Target({"kind": "llvm", "mcpu": c})) for c in ("znver4", "haswell", "x86-64")] == [
        512,
        256,
        128,
    ]
    assert [targets.vector_registers(Target({"kind": "llvm", "mcpu": c})) for c in ("znver4", "haswell")] == [32, 16]

"""What a machine is, and in what it isn't another one."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from tvm.target import Target

from tvm_axe.machines import resolve_target
from tvm_axe.meta.fleet.fingerprint import Fingerprint

VERSIONS = {"tvm-axe": "1.0", "apache-tvm": "0.27.0"}
HOST = Fingerprint("znver4", "AMD EPYC 9354", 8, 3000, versions=VERSIONS)
GPU = Fingerprint("znver4", "AMD EPYC 9354", 8, 3000, "NVIDIA H100", "sm_90a", 2, VERSIONS)


def llvm(**attributes):
    return Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 8} | attributes)


def cuda(arch="sm_90a"):
    return Target({"kind": "cuda", "arch": arch, "max_num_threads": 1024, "thread_warp_size": 32})


def test_it_is_json_and_back():
    own = Fingerprint.own()
    assert Fingerprint.told(json.loads(json.dumps(own.encode()))) == own
    assert own.cores == len(os.sched_getaffinity(0))
    assert own.cpu and own.model
    assert own.versions == Fingerprint.versions_here()
    assert set(own.versions) == {"tvm-axe", "apache-tvm"}


def test_this_machine_is_what_it_needs():
    assert Fingerprint.own().why_not(resolve_target("llvm"), Fingerprint.versions_here()) == []
    assert Fingerprint.own().unlike(Fingerprint.own(), on_host=True) == []


@pytest.mark.parametrize(
    "machine, target, why",
    [
        (HOST, llvm(), []),
        (replace(HOST, cpu="alderlake"), llvm(), ["its CPU is alderlake, not znver4"]),
        (replace(HOST, cpu="znver5"), llvm(), ["its CPU is znver5, not znver4"]),  # though it runs such code
        (HOST, llvm(mcpu="x86-64-v3"), []),  # all of the level are alike
        (replace(HOST, cpu=""), llvm(), []),  # it doesn't say
        (replace(HOST, cores=4), llvm(), ["it has 4 cores for a server, not 8"]),
        (replace(HOST, cores=16), llvm(), []),
        (replace(HOST, cores=0), llvm(), []),  # it doesn't say
        (replace(HOST, versions={**VERSIONS, "tvm-axe": "0.9"}), llvm(), ["it has tvm-axe 0.9, not 1.0"]),
        (replace(HOST, versions={}), llvm(), []),  # it doesn't say
        (
            replace(HOST, cpu="alderlake", cores=1, versions={**VERSIONS, "apache-tvm": "1"}),
            llvm(),
            [
                "it has apache-tvm 1, not 0.27.0",
                "its CPU is alderlake, not znver4",
                "it has 1 cores for a server, not 8",
            ],
        ),
        (GPU, cuda(), []),
        (replace(GPU, cpu="alderlake", cores=1), cuda(), []),
        (HOST, cuda(), ["its GPU is none, not sm_90a"]),
        (GPU, cuda(), []),
        (replace(GPU, gpu_code="sm_80"), cuda(), ["its GPU is sm_80, not sm_90a"]),
    ],
)
def test_in_what_a_machine_is_not_what_code_is_for(machine, target, why):
    assert machine.why_not(target, VERSIONS) == why


@pytest.mark.parametrize(
    "machine, target, why",
    [
        (HOST, llvm(**{"num-cores": 2}), []),
        (replace(HOST, cores=6), llvm(**{"num-cores": 2}), ["it has 6 cores for a server, not 8"]),
        (replace(GPU, gpus=4), cuda(), []),
        (GPU, cuda(), ["it has 2 GPUs, not 4"]),
    ],
)
def test_a_machine_has_a_meshs_devices(machine, target, why):
    assert machine.why_not(target, VERSIONS, devices=4) == why


def test_what_another_version_says_is_taken_as_far_as_it_is_known():
    told = {**HOST.encode(), "of another version": 1}
    del told["gpus"]
    assert Fingerprint.told(told) == HOST


@pytest.mark.parametrize(
    "machine, on_host, why",
    [
        (replace(HOST, cores=4, versions={}), True, []),
        (replace(HOST, model="AMD EPYC 9654"), True, ["its CPU is a AMD EPYC 9654, not a AMD EPYC 9354"]),
        (replace(HOST, mhz=3100), True, []),
        (replace(HOST, mhz=3300), True, ["its CPU runs at 3300 MHz, not 3000"]),
        (replace(HOST, mhz=0), True, []),  # it doesn't say
        (replace(HOST, model="another", mhz=1), False, []),  # its GPU measures
        (GPU, False, ["its GPU is a NVIDIA H100, not a "]),
    ],
)
def test_in_what_a_machine_is_not_like_the_first(machine, on_host, why):
    assert machine.unlike(HOST, on_host) == why

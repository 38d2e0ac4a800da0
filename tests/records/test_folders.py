"""Names of folders: readable, and found again by what is computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tvm.target import Target

from tvm_axe.errors import TuneError
from tvm_axe.machines.target import resolve_target
from tvm_axe.records.database import normalize
from tvm_axe.records.folders import MESH, folder_for, target_name, workload_name


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ({"kind": "llvm", "mcpu": "znver5", "num-cores": 2}, "llvm-znver5-2cores"),
        ({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}, "llvm-x86-64-v3-1core"),
        ("cuda:sm_90a", "cuda-sm_90a"),
    ],
)
def test_a_target_is_called_by_kind_model_and_cores(target, name):
    assert target_name(resolve_target(target)) == name


def test_what_else_sets_a_target_apart_is_in_its_name():
    plain = {"kind": "llvm", "mcpu": "haswell", "num-cores": 2}
    names = [target_name(resolve_target(plain | more)) for more in ({}, {"mattr": ["-fma"]}, {"mattr": ["-avx2"]})]
    assert len({*names}) == 3
    assert all(name.startswith("llvm-haswell-2cores") for name in names)
    assert target_name(Target(plain)) == names[0] == "llvm-haswell-2cores"


def test_a_workload_keeps_its_folder_under_every_name(tmp_path, matmul, target):
    mod = normalize(matmul(4, 5, 6))
    folder = folder_for(tmp_path, target, "fused matmul/<1>", mod)
    assert folder.is_dir()
    assert folder.parent == tmp_path / target_name(target)
    assert folder.name.startswith("fused_matmul_1-4x5x6-")
    assert folder_for(tmp_path, target, "other", mod) == folder
    assert folder_for(tmp_path, target, "other", normalize(matmul(5, 4, 6))) != folder
    assert folder_for(tmp_path / "elsewhere", target, "", mod).name.startswith("unnamed-4x5x6-")


def test_jobs_that_start_at_once_share_a_folder(tmp_path, matmul, target):
    mod = normalize(matmul(4, 5, 6))
    with ThreadPoolExecutor(8) as jobs:
        folders = list(jobs.map(lambda n: folder_for(tmp_path, target, f"name{n}", mod), range(32)))
    assert len({*folders}) == 1


def test_ones_are_left_out_and_a_mesh_is_told(matmul):
    assert workload_name("mm", normalize(matmul(1, 5, 6))).startswith("mm-5x6-")
    assert workload_name("mm", normalize(matmul(1, 1, 1))).count("-") == 1
    mod = normalize(matmul(4, 5, 6))
    mod.update_func(mod.get_global_var("main"), mod["main"].with_attr(MESH, "dp=2,tp=4"))
    assert workload_name("mm", mod).startswith("mm-dp=2,tp=4-4x5x6-")


def test_a_work_dir_that_is_a_file_is_refused(tmp_path, matmul, target):
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match=r"work_dir: .*file/llvm.* cannot be used"):
        folder_for(tmp_path / "file", target, "mm", normalize(matmul(4, 4, 4)))

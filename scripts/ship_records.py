"""Tunes what the package ships records of, and puts the best of them into it.

    python scripts/ship_records.py [--only llvm-x86-64-v3,...] [--trials 64] [--keep 3] [--work-dir .scratch/ship]

For the two generic levels of x86 CPUs (AVX2 and AVX-512) and this machine's own CPU, with one core and with two: the
local kernels of the demo under its three schedules, and float32 products of matrices. It takes a quiet machine of two
cores with AVX-512 about a minute for each kernel and target; what is in the work directory already is not tuned again,
so it can be stopped and started. Records of other machines are shipped the same way:

    tvm-axe db merge THEIR_LOGS tuning_logs && tvm-axe db prune shipped --keep 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tvm import tirx
from tvm.ir import IRModule
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.demo import block
from tvm_axe.machines.target import host_cpu, resolve_target
from tvm_axe.meta import tune
from tvm_axe.records.maintenance import merge, prune
from tvm_axe.records.shipped import SHIPPED

MATMULS = ((512, 512, 512), (1024, 1024, 1024), (512, 3072, 768))
CORES = (1, 2)
SEED = 0


def matmul(m: int, k: int, n: int) -> tirx.PrimFunc:
    """``C = A @ B`` in float32, as TVMScript."""

    @T.prim_func(s_tir=True)
    def matmul(A: T.Buffer((m, k), "float32"), B: T.Buffer((k, n), "float32"), C: T.Buffer((m, n), "float32")):
        for i, j, l in T.grid(m, n, k):
            with T.sblock("matmul"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]

    return matmul


def kernels() -> Iterator[IRModule]:
    """What is tuned, a module at a time."""
    for shape in MATMULS:
        yield IRModule({"matmul": matmul(*shape)})
    for apply in block.SCHEDULES.values():
        sch = axe.Schedule(block.block, mesh=block.mesh)
        apply(sch)
        local = axe.compile(sch, work_dir=None).module
        yield IRModule({var: func for var, func in local.functions_items() if isinstance(func, tirx.PrimFunc)})


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="CPU,...", help="LLVM's names (default: the three)")
    parser.add_argument("--trials", type=int, default=64, help="for each kernel (default: %(default)s)")
    parser.add_argument("--keep", type=int, default=3, help="schedules of each kernel to ship (default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, default=Path(".scratch/ship"), help="default: %(default)s")
    parser.add_argument("--to", type=Path, default=SHIPPED, metavar="DIR", help="default: tuning_logs")
    args = parser.parse_args()
    cpus = args.only.split(",") if args.only else [*dict.fromkeys(["x86-64-v3", "x86-64-v4", host_cpu()])]
    for cpu in cpus:
        for cores in CORES:
            target = resolve_target({"kind": "llvm", "mcpu": cpu, "num-cores": cores})
            for mod in kernels():
                result = tune(mod, target=target, trials=args.trials, work_dir=args.work_dir, seed=SEED)
                for task in result.tasks:
                    print(f"{cpu} {cores}: {task.name}: {task.best_ms} ms", file=sys.stderr)
    count = merge([args.work_dir], args.to)
    kept, dropped = prune(args.to, args.keep)
    print(f"{args.to}: {count['records']} new records, {dropped} of all dropped, {kept} there now")


if __name__ == "__main__":
    main()

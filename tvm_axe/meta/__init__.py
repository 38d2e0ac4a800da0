"""Tuning: find the fastest schedules of kernels and of programs on a mesh, and keep every measurement in a database.

Its parts import one way, in this order from below:

    measure     builds and runs candidates in processes of their own, and judges their results
    fleet       the same on other machines, which a tracker hands out
    task        what became of one workload so far; `result`, what a call came to
    spaces      what candidates there are of a kernel
    model       the cost model, and what it is told of a candidate
    report      a job's progress, and the page on it
    search      the search over kernels: trials, finals, the policy that says what is faster beyond noise
    mesh        the search over a program's schedules on a mesh, with its kernels
    tuner       `axe.tune`, for all of them
"""

from tvm_axe.meta.result import Found, TuneResult
from tvm_axe.meta.task import TaskResult
from tvm_axe.meta.tuner import tune

__all__ = ["Found", "TaskResult", "TuneResult", "tune"]

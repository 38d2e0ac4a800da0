"""The local kernels of a program's schedules: tuned as any function is, with records of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.lower import Lowered
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.search.loop import Job
from tvm_axe.meta.search.search import Tools
from tvm_axe.meta.search.workloads import workloads_of
from tvm_axe.meta.task import TaskResult, Workload

__all__ = ["KernelTuner", "local_kernels"]


def local_kernels(lowered: Lowered) -> IRModule:
    """What the devices run beside collectives: the functions of the lowered module that are made of blocks."""
    functions = {name: func for name, func in lowered.module.functions_items() if isinstance(func, tirx.PrimFunc)}
    return IRModule({name: func for name, func in functions.items() if func.attrs and func.attrs.get("s_tir")})


class KernelTuner:
    """Tunes the kernels of schedules that are about to be measured, unless an earlier schedule had them too.

    Parameters
    ----------
    candidates
        What is known of the program's schedules.
    tools, target, work_dir, trials, seed
        As `tvm_axe.meta.search.loop.Job` takes them, `trials` for each kernel on average.
    progress
        Whether to show a bar.

    Attributes
    ----------
    results
        What tuning each kernel came to, by the workload's hash.
    seconds
        Where the time went, as `tvm_axe.meta.search.loop.Job` says it.
    """

    def __init__(
        self,
        candidates: Candidates,
        tools: Tools,
        target: Target,
        work_dir: Path,
        trials: int,
        seed: int,
        progress: bool = False,
    ) -> None:
        self.candidates = candidates
        self.tools, self.target, self.work_dir = tools, target, work_dir
        self.trials, self.seed, self.progress = trials, seed, progress
        self.results: dict[str, TaskResult] = {}
        self.seconds: Counter[str] = Counter()

    def tune(self, mods: Sequence[IRModule]) -> None:
        """Tune what these schedules need, and more of them what more of them need."""
        new: dict[str, Workload] = {}
        for mod in mods:
            for digest, workload in self._workloads(mod):
                if digest not in self.results:
                    weight = new[digest].weight if digest in new else 0
                    new[digest] = Workload(workload.name, workload.mod, weight + 1)
        if not new:
            return
        job = Job(list(new.values()), self.tools, self.target, self.work_dir, self.trials, self.seed)
        self.results |= dict(zip(new, job.run(self.progress)))
        self.seconds.update(job.seconds)

    def folders(self, mod: IRModule) -> list[Path]:
        """The databases of a schedule's kernels, of which those are known that were tuned."""
        return [self.results[digest].folder for digest, _ in self._workloads(mod) if digest in self.results]

    def _workloads(self, mod: IRModule) -> list[tuple[str, Workload]]:
        """A schedule's kernels by their hashes; without those that index peers' slabs, which take a coordinate."""
        workloads, _ = workloads_of(local_kernels(self.candidates.lowered(mod)), self.target)
        return [(_tvm.workload_hash(workload.mod), workload) for workload in workloads]

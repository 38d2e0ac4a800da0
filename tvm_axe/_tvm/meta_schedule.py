"""MetaSchedule: contexts, records and hashes."""

from __future__ import annotations

import logging
from typing import Any

import tvm_ffi
from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.analysis import estimate_tir_flops as _estimate_tir_flops
from tvm.s_tir.meta_schedule import _ffi_api as _ms_ffi
from tvm.s_tir.meta_schedule import logging as _ms_logging
from tvm.s_tir.meta_schedule import utils as _ms_utils
from tvm.target import Target

from tvm_axe._tvm.tensorir import plain


def tune_context(
    mod: IRModule,
    target: Target,
    space: ms.SpaceGenerator,
    strategy: ms.SearchStrategy,
    name: str,
    seed: int,
    threads: int,
    logger: logging.Logger,
) -> ms.TuneContext:
    """A `TuneContext`; its own constructor imports every tensor intrinsic of every target first, which takes 13 s."""
    context: ms.TuneContext = ms.TuneContext.__new__(ms.TuneContext)
    context.__init_handle_by_constructor__(
        _ms_ffi.TuneContext, mod, target, space, strategy, name, threads, seed, _ms_logging.get_logging_func(logger)
    )
    _ms_ffi.TuneContextInitialize(context)
    return context


def record_json(record: ms.database.TuningRecord) -> list[Any]:
    """A record as MetaSchedule's databases write it; its own `as_json` refuses traces with `transform_layout`."""
    return plain(_ms_ffi.TuningRecordAsJSON(record))


def workload_hash(mod: IRModule) -> str:
    """The structural hash as MetaSchedule's JSON databases write it; names of blocks, buffers and loops don't count."""
    return str(int(_ms_utils.shash2hex(mod), 16))


def structural_equal(a: IRModule, b: IRModule) -> bool:
    """Whether two modules are the same up to names."""
    return bool(tvm_ffi.structural_equal(a, b))


def drawn(trace: s_tir.schedule.Trace, *kinds: str) -> list[s_tir.schedule.Instruction]:
    """The instructions of a trace that are of some kinds of samples, such as ``"SampleCategorical"``, in order."""
    return [instruction for instruction in trace.insts if instruction.kind.name in kinds]


def flops(mod: IRModule) -> float:
    """Arithmetic operations that a call does, as upstream estimates them; 0 where it can't count them."""
    try:
        return float(_estimate_tir_flops(mod))
    except (RuntimeError, ValueError, TypeError):
        return 0.0

"""The one place that touches upstream's private or unstable API.

Written against apache-tvm 0.27.0.post1. Everything else in the package uses upstream's public names only, so that a
new release is met here and nowhere else. There is a module for each part of upstream; what they give is asked for here.
"""

from tvm_axe._tvm.arrays import as_array, as_tensor, device_tensor, restrided
from tvm_axe._tvm.building import (
    build_cuda,
    build_relax,
    nvrtc_cubin,
    nvrtc_version,
    register_pipeline,
)
from tvm_axe._tvm.disco import DISCO_EXECUTE, DiscoSession, disco_rank, disco_serve, register_functions, use_threads
from tvm_axe._tvm.errors import (
    UPSTREAM_ERRORS,
    is_of_naming,
    is_own_fault,
    is_unsaid,
    raise_own_fault,
    schedule_error_reason,
    why_refused,
)
from tvm_axe._tvm.flattening import iter_map, keep_sums
from tvm_axe._tvm.importing import from_onnx, torch_converters
from tvm_axe._tvm.legalizing import legalize_ops
from tvm_axe._tvm.llvm import compile_llvm, load_llvm
from tvm_axe._tvm.meta_schedule import drawn, flops, record_json, structural_equal, tune_context, workload_hash
from tvm_axe._tvm.paged import PAGED, PAGED_ATTENDS, PAGED_CREATES, PAGED_POSITIONS, PagedCache, paged_cache, paged_call
from tvm_axe._tvm.parsing import keep_stacks_short
from tvm_axe._tvm.quotients import reduced
from tvm_axe._tvm.reflection import NodeType, is_instruction, node_type, operators
from tvm_axe._tvm.relax import (
    PREPACK,
    is_building,
    relax_dispatching,
    relax_lowering,
    split_preproc,
    with_attributes,
    with_kernels_built,
    without_layouts_of_unknown_extents,
)
from tvm_axe._tvm.renormalizing import keep_remainders
from tvm_axe._tvm.rocm import build_rocm, intrinsic_name
from tvm_axe._tvm.rpc import (
    RpcTracker,
    rpc_connect,
    rpc_function,
    rpc_greet,
    rpc_match,
    rpc_serve,
    rpc_tracker,
)
from tvm_axe._tvm.structural import (
    constant_bytes,
    content,
    is_float,
    is_plain_context,
    is_zero,
    load_json,
    structural_map,
    variables_of,
    without_places,
)
from tvm_axe._tvm.targets import cpu_features, host_triple, is_valid_cpu, system_cpu
from tvm_axe._tvm.tensorir import (
    block_realize,
    has_partials,
    plain,
    put_back,
    rename_block,
    statement,
    tensor_argument,
    widened,
    with_name,
)
from tvm_axe._tvm.tile import (
    builder,
    device_call,
    dispatch_predicate,
    fast_exp2,
    function_frame,
    memory_layout,
    register_dispatch,
    strided_buffer,
    swizzle_of,
    swizzled_layout,
    warpgroup_layout,
)
from tvm_axe._tvm.transposed import fuse_transposed_products
from tvm_axe._tvm.vectorizing import keep_lanes

__all__ = [
    "DISCO_EXECUTE",
    "PAGED",
    "PAGED_ATTENDS",
    "PAGED_CREATES",
    "PAGED_POSITIONS",
    "PREPACK",
    "UPSTREAM_ERRORS",
    "DiscoSession",
    "NodeType",
    "PagedCache",
    "RpcTracker",
    "as_array",
    "as_tensor",
    "block_realize",
    "build_cuda",
    "build_relax",
    "build_rocm",
    "builder",
    "compile_llvm",
    "constant_bytes",
    "content",
    "cpu_features",
    "device_call",
    "device_tensor",
    "disco_rank",
    "disco_serve",
    "dispatch_predicate",
    "drawn",
    "fast_exp2",
    "flops",
    "from_onnx",
    "function_frame",
    "fuse_transposed_products",
    "has_partials",
    "host_triple",
    "intrinsic_name",
    "is_building",
    "is_float",
    "is_instruction",
    "is_of_naming",
    "is_own_fault",
    "is_plain_context",
    "is_unsaid",
    "is_valid_cpu",
    "is_zero",
    "iter_map",
    "legalize_ops",
    "load_json",
    "load_llvm",
    "memory_layout",
    "node_type",
    "nvrtc_cubin",
    "nvrtc_version",
    "operators",
    "paged_cache",
    "paged_call",
    "plain",
    "put_back",
    "raise_own_fault",
    "record_json",
    "reduced",
    "register_dispatch",
    "register_functions",
    "register_pipeline",
    "relax_dispatching",
    "relax_lowering",
    "rename_block",
    "restrided",
    "rpc_connect",
    "rpc_function",
    "rpc_greet",
    "rpc_match",
    "rpc_serve",
    "rpc_tracker",
    "schedule_error_reason",
    "split_preproc",
    "statement",
    "strided_buffer",
    "structural_equal",
    "structural_map",
    "swizzle_of",
    "swizzled_layout",
    "system_cpu",
    "tensor_argument",
    "torch_converters",
    "tune_context",
    "use_threads",
    "variables_of",
    "warpgroup_layout",
    "why_refused",
    "widened",
    "with_attributes",
    "with_kernels_built",
    "with_name",
    "without_layouts_of_unknown_extents",
    "without_places",
    "workload_hash",
]

keep_sums()
keep_lanes()
keep_remainders()
keep_stacks_short()

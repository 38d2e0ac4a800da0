"""Tile kernels on a CUDA GPU, each beside PyTorch's (cuBLAS, cuDNN) or the copy bandwidth in the same run.

    python scripts/bench_gpu.py [--only TEXT] [--part K/N] [--rounds 9] [--parameter NAME=INT ...] [--json]
    python scripts/bench_gpu.py --compile       only compile, which needs no GPU and fills the cache
    python scripts/bench_gpu.py --tilelang DIR  beside TileLang, too, installed by `pip install --target DIR tilelang`

The bound is the tensor cores' rate for products (bf16 on an H200: about 810 TFLOP/s by cuBLAS) and the memory's for
the rest (about 4250 GB/s, by a copy). Each kernel is checked first, on fresh random data, with its outputs poisoned.
Then both run from CUDA graphs over several input sets in rotation, in turns; times are medians by CUDA events: of
bursts of a few milliseconds on a rested GPU and, for long products, of 60 ms without a rest.

TileLang has a TVM of its own, so its programs (`tilelang_programs.py`) run in another process: on the same inputs, by
the same clock, in the same turns. Its knobs are those of its candidates that are fastest here; ours are the defaults.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import convolutions_gpu
import kernels_gpu
from peer_process import PeerProcess
from tensors_gpu import EXPERTS, Spec, equation, gated
from timing_gpu import Series, Timer, calls_of, captured, in_turns, part, size
from tvm.target import Target

from tvm_axe.machines.target import resolve_target
from tvm_axe.tile import compile_all
from tvm_axe.tile.kernels import KERNELS, Kernel, matmul_for
from tvm_axe.tile.kernels.einsum import Operands

PRODUCT, MEMORY = "TFLOP/s", "GB/s"
TILELANG = "tilelang"
IN_TILELANG = (
    "decode_attention", "block_sparse_attention", "mla_decode", "w4a16_matmul", "chunk_state", "chunk_scan",
    "grouped_matmul",
)  # fmt: skip
"""Kernels that `tilelang_programs.candidates` has programs of."""

LAYERS = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
"""Columns and depth of the products in a layer of a decoder of 8 billion parameters."""

EINSUMS = {
    "heads of qkv": ("b:4 s:2048 k:2048", "w:3 h:16 k:2048 x:128", "w:3 h:16 b:4 s:2048 x:128"),
    "scores": ("b:4 s:2048 h:16 x:128", "b:4 t:2048 h:16 x:128", "b:4 h:16 s:2048 t:2048"),
    "values": ("b:4 h:16 s:2048 t:2048", "b:4 t:2048 h:16 x:128", "b:4 s:2048 h:16 x:128"),
    "out of heads": ("b:4 s:2048 h:16 x:128", "h:16 x:128 j:2048", "b:4 s:2048 j:2048"),
    "experts": ("s:2 e:8 c:512 h:2048", "e:8 h:2048 f:4096", "s:2 e:8 c:512 f:4096"),
    "both transposed": ("k:4096 i:4096", "j:4096 k:4096", "i:4096 j:4096"),
}
"""Products of attention and of experts, whose operands lie in memory as a model has them."""


@dataclass(frozen=True)
class Case:
    """A kernel on a problem beside a peer; `work` is in floating-point operations or in bytes."""

    name: str
    kernel: Kernel
    problem: Mapping[str, Any]
    peer: str
    work: float
    unit: str = PRODUCT
    tolerance: float = 1e-2


def cases(target: Target) -> Iterator[Case]:
    """What is measured, in order."""
    for n in (1024, 2048, 4096, 8192):
        yield product(target, f"gemm {n}x{n}x{n}", n, n, n)
    for layer, (n, k) in LAYERS.items():
        for tokens in (1, 16, 128, 1000, 4096):
            yield product(target, f"layer {layer} {tokens}x{n}x{k}", tokens, n, k)
    for n in (4096, 8192):
        problem = {"m": n, "n": n, "k": n, "dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}
        yield Case(f"fp8 {n}x{n}x{n}", KERNELS["fp8_matmul"], problem, "scaled_mm", 2.0 * n**3, tolerance=5e-2)
        yield Case(f"fp8 {n}x{n}x{n}", KERNELS["fp8_matmul"], problem, "bf16 matmul", 2.0 * n**3, tolerance=5e-2)
    for name, (a, b, c) in EINSUMS.items():
        operands = Operands.parse(a, b, c)
        problem = {**operands.texts, "dtype": "bfloat16"}
        yield Case(f"einsum {name}", KERNELS["einsum"], problem, "einsum", 2.0 * math.prod(operands.extents.values()))
    for tokens in (64, 512, 4096):
        yield from experts(tokens)
    for name, problem, one in kernels_gpu.attentions():
        yield Case(f"attention {name}", KERNELS["attention"], problem, "cudnn", 2 * one)
    cache = {"batch": 16, "heads": 32, "kv_heads": 8, "capacity": 32768, "dim": 128, "dtype": "bfloat16"}
    bytes_ = 2.0 * 2 * 16 * 8 * 32768 * 128
    yield Case("decode 16x32/8x32768x128", KERNELS["decode_attention"], cache, "sdpa", bytes_, MEMORY)
    paged = {**cache, "page": 64, "pages": 16 * 32768 // 64}
    yield Case("paged 16x32/8x32768x128", KERNELS["decode_attention"], paged, "sdpa of pages", bytes_, MEMORY)
    for name, kernel, problem, peer_name, work, is_memory in kernels_gpu.cases():
        yield Case(name, KERNELS[kernel], problem, peer_name, work, MEMORY if is_memory else PRODUCT)
    for name, problem, work in convolutions_gpu.cases():
        yield Case(name, KERNELS["conv2d"], problem, "cudnn conv2d", work)
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        problem = {"rows": 8192, "columns": 8192, "dtype": dtype}
        for name in ("rms_norm", "softmax", "transpose"):
            for peer in ("copy", "torch"):
                label = f"{name} 8192x8192 {dtype}"
                yield Case(label, KERNELS[name], problem, peer, 2.0 * width * 8192**2, MEMORY)
    problem = {"rows": 8192, "columns": 8192, "dtype": "bfloat16", "residual": True, "out_dtype": "int8"}
    name = "rms_norm of sums 8192x8192 int8"
    yield Case(name, KERNELS["rms_norm"], problem, "torch", 7.0 * 8192**2, MEMORY, tolerance=3e-2)


def product(target: Target, name: str, m: int, n: int, k: int) -> Case:
    """C = A B^T in bf16 beside cuBLAS; where reading the weights takes longer than multiplying, by what it reads."""
    problem = {"m": m, "n": n, "k": k, "dtype": "bfloat16"}
    kernel = matmul_for(target, problem)
    if m <= 128:
        return Case(name, kernel, problem, "cublas", 2.0 * (m * k + n * k + m * n), MEMORY)
    return Case(name, kernel, problem, "cublas", 2.0 * m * n * k)


def experts(tokens: int) -> Iterator[Case]:
    """A layer's experts in bf16, by what reading all weights takes where that is longer than multiplying."""
    groups, hidden, inner = EXPERTS["groups"], EXPERTS["hidden"], EXPERTS["inner"]
    rows = tokens * EXPERTS["choices"]
    both: dict[str, Any] = {"rows": rows, "groups": groups, "dtype": "bfloat16"}
    for name, n, k, wide, options in (
        ("gate and up", inner, hidden, 2 * inner, {"activation": "silu", "gated": True}),
        ("down", hidden, inner, hidden, {}),
    ):
        flops, bytes_ = 2.0 * rows * wide * k, 2.0 * (groups * wide * k + rows * (k + n))
        bound = (flops, PRODUCT) if flops / 8e14 > bytes_ / 3.35e12 else (bytes_, MEMORY)
        problem = {**both, "n": n, "k": k, **options}
        yield Case(f"experts {name} {tokens} tokens", KERNELS["grouped_matmul"], problem, "grouped_mm", *bound)


# ---- Tensors, peers and references in PyTorch ----------------------------------------------------------------------


class Bench:
    """Compiled kernels and what they are run on, made once a case."""

    def __init__(self, case: Case, target: Target, parameters: Mapping[str, int]) -> None:
        space = case.kernel.parameters(target, case.problem)
        chosen = {name: value for name, value in parameters.items() if name in space}
        self.case = case
        self.recipe = case.kernel.recipe(target, case.problem, **chosen)
        self.programs = compile_all(self.recipe.programs, target)
        tensors = {name: (tuple(map(int, shape)), dtype) for name, (shape, dtype) in self.recipe.tensors.items()}
        inputs, outputs = self.recipe.inputs, self.recipe.outputs
        self.spec = Spec(case.kernel.name, case.problem, tensors, inputs, outputs, case.tolerance)

    def run(self, made: Mapping[str, Any]) -> None:
        for program, names in zip(self.programs, self.recipe.arguments):
            program(*(made[name] for name in names))


def peer(case: Case) -> Callable[[Mapping[str, Any]], object]:
    """PyTorch's function of the same tensors."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(backends: Sequence[SDPBackend], t: Mapping[str, Any]) -> object:
        q = t["Q"] if t["Q"].dim() == 4 else t["Q"].unsqueeze(2)
        grouped = case.problem["heads"] != case.problem["kv_heads"]
        causal = case.problem.get("causal", False)
        with sdpa_kernel(list(backends)):
            return F.scaled_dot_product_attention(q, t["K"], t["V"], is_causal=causal, enable_gqa=grouped)

    def paged(t: Mapping[str, Any]) -> object:
        pages = t["table"].long()  # PyTorch attends to what is contiguous
        gathered = {name: t[name][pages].transpose(1, 2).flatten(2, 3) for name in "KV"}
        return attend([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], {"Q": t["Q"], **gathered})

    def scaled_mm(t: Mapping[str, Any]) -> object:
        a, b, scales = t["A"], t["B"].T, (t["a_scale"], t["b_scale"])
        return torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    def torchs(t: Mapping[str, Any]) -> object:
        if case.kernel.name == "rms_norm":
            y = F.rms_norm(t["X"] + t["R"] if "R" in t else t["X"], (case.problem["columns"],), t["weight"], 1e-6)
            return y if "scales" not in t else (y / (y.abs().amax(-1, keepdim=True) / 127)).round().to(torch.int8)
        if case.kernel.name == "softmax":
            return t["X"].softmax(-1)
        return t["X"].T.contiguous()

    converted: dict[int, tuple[Any, Any]] = {}

    def bf16_matmul(t: Mapping[str, Any]) -> object:
        if id(t) not in converted:  # at the first call, which is not timed
            converted[id(t)] = t["A"].bfloat16(), t["B"].bfloat16()
        a, b = converted[id(t)]
        return torch.matmul(a, b.T, out=t["C"])

    def grouped_mm(t: Mapping[str, Any]) -> object:
        product = torch._grouped_mm(t["X"], t["W"].transpose(1, 2), offs=t["starts"][1:])
        return gated(case.problem, product)

    return {
        "grouped_mm": grouped_mm,
        "cublas": lambda t: torch.matmul(t["A"], t["B"].T, out=t["C"]),
        "einsum": lambda t: torch.einsum(equation(case.problem), t["A"], t["B"]),
        "scaled_mm": scaled_mm,
        "bf16 matmul": bf16_matmul,
        "cudnn": lambda t: attend([SDPBackend.CUDNN_ATTENTION], t),
        "sdpa": lambda t: attend([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], t),
        "sdpa of pages": paged,
        "copy": lambda t: t["Y"].view(t["X"].shape).copy_(t["X"]),
        "torch": torchs,
        **kernels_gpu.peers(case.problem, case.kernel.name),
        **convolutions_gpu.peers(case.problem),
    }[case.peer]


# ---- Timing ------------------------------------------------------------------------------------------------------


def measured(
    case: Case, target: Target, parameters: Mapping[str, int], rounds: int, tilelang: PeerProcess | None
) -> list[dict[str, Any]]:
    """A row for bursts and, of long products, one for sustained runs."""
    bench = Bench(case, target, parameters)
    seeds = [random.randrange(2**31) for _ in range(4)]
    first = bench.spec.drawn(seeds[0])
    bench.run(first)
    error = bench.spec.error(first)
    seeds = seeds if 4 * size(first) < 6e10 else seeds[:2]
    sets = [first, *map(bench.spec.drawn, seeds[1:])]
    seconds = case.work / (8e14 if case.unit == PRODUCT else 4e12)
    calls, own = calls_of(seconds), {"ours": bench.run}
    knobs = ""
    if case.peer == TILELANG:
        assert tilelang is not None
        chosen = chosen_of(tilelang, spec=asdict(bench.spec), seeds=seeds, calls=calls)
        same(bench.spec.sums(first), chosen["sums"])
        knobs = said(chosen)
    else:
        own[case.peer] = peer(case)
    timers: dict[str, Timer] = {name: graph.timed for name, graph in captured(own, sets, calls).items()}
    if case.peer == TILELANG:
        timers[TILELANG] = lambda seconds: float(tilelang.ask("time", seconds=seconds)["milliseconds"])
    kinds = [("burst", 0.1, 0.0)]
    if case.unit == PRODUCT and seconds > 1e-4:
        kinds.append(("sustained", 0.0, 0.06))
    rows = []
    for kind, pause, long in kinds:
        ours, theirs = in_turns(timers, rounds, pause, long).values()
        rate = case.work / ours * (1e-9 if case.unit == PRODUCT else 1e-6)
        rows.append(
            {
                "name": case.name, "kind": kind, "kernel": case.kernel.name, "ours_ms": ours, "rate": rate,
                "unit": case.unit, "peer": case.peer, "peer_ms": theirs, "ratio": theirs / ours, "error": error,
                "knobs": knobs,
            }
        )  # fmt: skip
    return rows


def chosen_of(peer: PeerProcess, **question: Any) -> dict[str, Any]:
    """What the peer chooses, in a new process for each candidate at which the GPU stopped."""
    lost: dict[str, str] = {}
    while True:
        answer = peer.ask("choose", **question, without=lost)
        if "lost" not in answer:
            return answer
        lost[answer["lost"]] = answer["why"]
        peer.again()


def same(ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    """See that two processes drew the same inputs.

    Raises
    ------
    AssertionError
        They didn't.
    """
    for name, value in ours.items():
        if not math.isclose(value, theirs[name], rel_tol=1e-6):
            raise AssertionError(
                f"the peer's process has another {name}: squares add up to {theirs[name]}, not {value}"
            )


def said(chosen: Mapping[str, Any]) -> str:
    """Which candidate was chosen, how far off it is, and which were left out and why."""
    left_out = "".join(f"; left out {name}: {why}" for name, why in chosen["left_out"].items())
    return f"{chosen['knobs']}, error {chosen['error']:.1e}{left_out}"


def beside_tilelang(cases: Iterable[Case]) -> Iterator[Case]:
    """The cases and, once for each problem of a kernel that TileLang has a program of, the same beside TileLang."""
    seen: set[str] = set()
    for case in cases:
        yield case
        written = case.kernel.name in IN_TILELANG and not {"zeros", "weights"} & {*case.problem}
        if written and case.name not in seen:
            seen.add(case.name)
            yield replace(case, peer=TILELANG)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name, kernel or peer has this text")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each (default: %(default)s)")
    parser.add_argument(
        "--parameter", action="append", default=[], metavar="NAME=INT", help="instead of the kernel's default"
    )
    parser.add_argument("--part", type=part, default="0/1", metavar="K/N", help="every N-th case from the K-th")
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--tilelang", type=Path, metavar="DIR", help="the folder that TileLang is installed into (pip install --target)"
    )
    args = parser.parse_args()
    parameters = {name: int(value) for name, _, value in (text.partition("=") for text in args.parameter)}
    target = resolve_target("cuda")
    own = [*cases(target)][args.part]
    chosen = [c for c in beside_tilelang(own) if args.only in f"{c.name} {c.kernel.name} {c.peer}"]
    theirs = [(c.kernel.name, c.problem) for c in chosen if c.peer == TILELANG]
    tilelang = PeerProcess(Path(__file__).with_name("tilelang_gpu.py"), args.tilelang) if args.tilelang else None
    if tilelang is None:
        chosen = [case for case in chosen if case.peer != TILELANG]
        if theirs:
            print(f"TileLang is left out of {len(theirs)} cases: --tilelang says where it is", file=sys.stderr)
    elif theirs:
        start = time.perf_counter()
        made = tilelang.ask("compile", cases=theirs)
        print(f"TileLang: {made['compiled']} programs compiled in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        for name, left_out in made["left_out"].items():
            print(f"TileLang: {name}: {left_out}", file=sys.stderr)
    series = Series(args.json)
    for case in chosen:
        with series.case(f"{case.name} beside {case.peer}"):
            if args.compile:
                start = time.perf_counter()
                Bench(case, target, parameters)
                print(f"{case.name}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
                continue
            for row in measured(case, target, parameters, args.rounds, tilelang):
                series.add(
                    row,
                    f"{row['name']:<32} {row['kind']:<9} {row['kernel']:<16} {row['ours_ms'] * 1e3:9.2f} us "
                    f"{row['rate']:7.1f} {row['unit']:<7}  {row['peer']:<11} {row['peer_ms'] * 1e3:9.2f} us  "
                    f"ratio {row['ratio']:.3f}  error {row['error']:.1e}  {row['knobs']}".rstrip(),
                )
    if tilelang is not None:
        tilelang.end()
    series.end()


if __name__ == "__main__":
    main()

"""Tile kernels on a CUDA GPU, each beside PyTorch's (cuBLAS, cuDNN) or the copy bandwidth in the same run.

    python scripts/bench_gpu.py [--only TEXT] [--rounds 9] [--parameter NAME=INT ...] [--json]
    python scripts/bench_gpu.py --compile       only compile, which needs no GPU and fills the cache

The bound is the tensor cores' rate for products (bf16 on an H200: about 810 TFLOP/s by cuBLAS) and the memory's for
the rest (about 4250 GB/s, by a copy). Each kernel is checked first, on fresh random data, with its outputs poisoned.
Then both run from CUDA graphs over several input sets in rotation, in turns; times are medians by CUDA events: of
bursts of a few milliseconds on a rested GPU and, for long products, of 60 ms without a rest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kernels_gpu
from tvm.target import Target

from tvm_axe.machines.target import resolve_target
from tvm_axe.tile import compile_all
from tvm_axe.tile.kernels import KERNELS, Kernel, matmul_for
from tvm_axe.tile.kernels.einsum import Operands

PRODUCT, MEMORY = "TFLOP/s", "GB/s"
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

EXPERTS = {"groups": 128, "choices": 8, "hidden": 2048, "inner": 768}
"""Of Qwen3-30B-A3B: experts, how many of them a token chooses, the widths of the model and of an expert."""


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
    for causal in (False, True):
        shape = {"batch": 4, "heads": 32, "kv_heads": 32, "queries": 4096, "keys": 4096, "dim": 128}
        work = 4.0 * 4 * 32 * 4096**2 * 128 / (2 if causal else 1)
        name = "attention 4x32x4096x128" + (" causal" if causal else "")
        problem = {**shape, "dtype": "bfloat16", "causal": causal}
        yield Case(name, KERNELS["attention"], problem, "cudnn", work)
    cache = {"batch": 16, "heads": 32, "kv_heads": 8, "capacity": 32768, "dim": 128, "dtype": "bfloat16"}
    bytes_ = 2.0 * 2 * 16 * 8 * 32768 * 128
    yield Case("decode 16x32/8x32768x128", KERNELS["decode_attention"], cache, "sdpa", bytes_, MEMORY)
    for name, kernel, problem, peer_name, work, is_memory in kernels_gpu.cases():
        yield Case(name, KERNELS[kernel], problem, peer_name, work, MEMORY if is_memory else PRODUCT)
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        problem = {"rows": 8192, "columns": 8192, "dtype": dtype}
        for name in ("rms_norm", "softmax", "transpose"):
            for peer in ("copy", "torch"):
                label = f"{name} 8192x8192 {dtype}"
                yield Case(label, KERNELS[name], problem, peer, 2.0 * width * 8192**2, MEMORY)


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
    """Compiled kernels and what they are run on; made once a case."""

    def __init__(self, case: Case, target: Target, parameters: Mapping[str, int]) -> None:
        space = case.kernel.parameters(target, case.problem)
        chosen = {name: value for name, value in parameters.items() if name in space}
        self.case = case
        self.recipe = case.kernel.recipe(target, case.problem, **chosen)
        self.programs = compile_all(self.recipe.programs, target)

    def tensors(self) -> dict[str, Any]:
        """Fresh random tensors by name, with the outputs and scratch of NaN."""
        import torch

        made: dict[str, Any] = {}
        for name, (shape, dtype) in self.recipe.tensors.items():
            kind = getattr(torch, dtype)
            if name == "lengths":
                made[name] = torch.full(shape, self.case.problem["capacity"], dtype=kind, device="cuda")
            elif name == "starts":
                made[name] = routed(self.case.problem["rows"], self.case.problem["groups"])
            elif name not in self.recipe.inputs and not dtype.startswith("int"):
                made[name] = torch.full(shape, math.nan, device="cuda").to(kind)
            elif dtype == "uint8":
                made[name] = torch.randint(0, 256, shape, dtype=kind, device="cuda")
            else:
                made[name] = torch.randn(shape, device="cuda").to(kind)
        for name in {"a_scale", "b_scale"} & made.keys():
            made[name] = made[name].abs() + 0.5
        kernels_gpu.completed(self.case.kernel.name, self.case.problem, made)
        return made

    def run(self, made: Mapping[str, Any]) -> None:
        for program, names in zip(self.programs, self.recipe.arguments):
            program(*(made[name] for name in names))

    def check(self, made: Mapping[str, Any]) -> float:
        """The relative error of the norm against float32 or float64 in PyTorch, on a part where all is too much."""
        self.run(made)
        got, expected = compared(self.case.kernel.name, self.case.problem, made)
        error = float((got.double() - expected.double()).norm() / expected.double().norm())
        whole = all(bool(made[name].isfinite().all()) for name in self.recipe.outputs)
        if not (whole and error <= self.case.tolerance):
            raise AssertionError(f"relative error {error:.1e}, finite everywhere: {whole}")
        return error


def routed(rows: int, groups: int) -> Any:
    """Where each group's rows start, if tokens choose experts at random, none of them twice."""
    import torch

    tokens = rows // EXPERTS["choices"]
    chosen = torch.rand(tokens, groups, device="cuda").topk(EXPERTS["choices"]).indices
    counts = torch.bincount(chosen.flatten(), minlength=groups)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def compared(name: str, problem: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[Any, Any]:
    """What a kernel computed and what it should be, both of a part of the output if that is large."""
    import torch

    if name in ("attention", "decode_attention"):
        group = problem["heads"] // problem["kv_heads"]
        heads = [0, problem["heads"] - 1]
        pairs = []
        for h in heads:
            q = made["Q"][-1, h].double().reshape(-1, problem["dim"])
            k, v = (made[x][-1, h // group].double() for x in "KV")
            scores = q @ k.T / math.sqrt(problem["dim"])
            if problem.get("causal", False):
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
            pairs.append((made["O"][-1, h].reshape(-1, problem["dim"]), scores.softmax(-1) @ v))
        return torch.cat([got for got, _ in pairs]), torch.cat([expected for _, expected in pairs])
    if name == "rms_norm":
        x, weight = made["X"].double(), made["weight"].double()
        return made["Y"], x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    if name == "softmax":
        return made["Y"], made["X"].double().softmax(-1)
    if name == "transpose":
        return made["Y"], made["X"].T
    if name == "grouped_matmul":
        bounds = made["starts"].tolist()
        parts = [made["X"][a:b].float() @ w.float().T for a, b, w in zip(bounds, bounds[1:], made["W"])]
        return made["Y"], gated(problem, torch.cat(parts))
    if name == "einsum":
        return made["C"], torch.einsum(equation(problem), made["A"].float(), made["B"].float())
    if name in ("w4a16_matmul", "attention_backward", "chunk_state", "chunk_scan"):
        return kernels_gpu.compared(name, problem, made)
    scale = made["a_scale"] * made["b_scale"] if "a_scale" in made else 1.0
    return made["C"], made["A"].float() @ made["B"].float().T * scale


def gated(problem: Mapping[str, Any], product: Any) -> Any:
    """What a grouped product is followed by, in PyTorch."""
    import torch

    if not problem.get("gated", False):
        return product
    gate, up = product.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def equation(problem: Mapping[str, Any]) -> str:
    """A problem of the kernel einsum, of whole tensors, as numpy and torch write it."""
    a, b, c = ("".join(word.split(":")[0] for word in problem[name].split()) for name in "abc")
    return f"{a},{b}->{c}"


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

    def scaled_mm(t: Mapping[str, Any]) -> object:
        a, b, scales = t["A"], t["B"].T, (t["a_scale"], t["b_scale"])
        return torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    def torchs(t: Mapping[str, Any]) -> object:
        if case.kernel.name == "rms_norm":
            return F.rms_norm(t["X"], (case.problem["columns"],), t["weight"], 1e-6)
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
        "copy": lambda t: t["Y"].view(t["X"].shape).copy_(t["X"]),
        "torch": torchs,
        **kernels_gpu.peers(case.problem, case.kernel.name),
    }[case.peer]


# ---- Timing ------------------------------------------------------------------------------------------------------


def measured(case: Case, target: Target, parameters: Mapping[str, int], rounds: int) -> list[dict[str, Any]]:
    """A row for bursts and, of long products, one for sustained runs."""
    bench = Bench(case, target, parameters)
    first = bench.tensors()
    error = bench.check(first)
    seconds = case.work / (8e14 if case.unit == PRODUCT else 4e12)
    sets = [first, *(bench.tensors() for _ in range(3 if 4 * size(first) < 6e10 else 1))]
    launches = max(4, math.ceil(3e-3 / (seconds + 2e-6)))
    graphs = captured({"ours": bench.run, case.peer: peer(case)}, sets, launches)
    kinds = [("burst", 0.1, 1)]
    if case.unit == PRODUCT and seconds > 1e-4:
        kinds.append(("sustained", 0.0, max(1, math.ceil(0.06 / (seconds * launches)))))
    rows = []
    for kind, pause, replays in kinds:
        ours, theirs = (total / launches for total in in_turns(graphs, rounds, pause, replays).values())
        rate = case.work / ours * (1e-9 if case.unit == PRODUCT else 1e-6)
        rows.append(
            {
                "name": case.name, "kind": kind, "kernel": case.kernel.name, "ours_ms": ours, "rate": rate,
                "unit": case.unit, "peer": case.peer, "peer_ms": theirs, "ratio": theirs / ours, "error": error,
            }
        )  # fmt: skip
    return rows


def captured(
    functions: Mapping[str, Callable[[Mapping[str, Any]], object]], sets: Sequence[Mapping[str, Any]], launches: int
) -> dict[str, Any]:
    """A CUDA graph of each function, which calls it on the input sets in rotation."""
    import torch
    import tvm_ffi

    graphs = {}
    for name, function in functions.items():
        for made in sets:  # what is loaded or chosen at the first call is no part of a graph
            function(made)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with tvm_ffi.use_torch_stream(torch.cuda.graph(graphs[name])):
            for i in range(launches):
                function(sets[i % len(sets)])
    return graphs


def in_turns(graphs: Mapping[str, Any], rounds: int, pause: float, replays: int) -> dict[str, float]:
    """Median milliseconds of a replay of each graph, after `pause` seconds of rest and a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(rounds):
        for name in list(graphs)[:: 1 - 2 * (i % 2)]:
            time.sleep(pause)
            replayed(graphs[name], 1 + replays // 4)  # warm-up
            times[name].append(replayed(graphs[name], replays))
    return {name: statistics.median(series) for name, series in times.items()}


def size(made: Mapping[str, Any]) -> int:
    """Bytes of all tensors of a set."""
    return sum(tensor.numel() * tensor.element_size() for tensor in made.values())


def replayed(graph: Any, replays: int) -> float:
    """Milliseconds of a replay, by the GPU's clock."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / replays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name, kernel or peer has this text")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each (default: %(default)s)")
    parser.add_argument(
        "--parameter", action="append", default=[], metavar="NAME=INT", help="instead of the kernel's default"
    )
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    parameters = {name: int(value) for name, _, value in (text.partition("=") for text in args.parameter)}
    target = resolve_target("cuda")
    chosen = [c for c in cases(target) if args.only in f"{c.name} {c.kernel.name} {c.peer}"]
    rows, failed = [], 0
    for case in chosen:
        try:
            if args.compile:
                start = time.perf_counter()
                Bench(case, target, parameters)
                print(f"{case.name}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
                continue
            found = measured(case, target, parameters, args.rounds)
        except Exception as error:  # the others are measured whatever one does
            failed += 1
            print(
                f"{case.name} beside {case.peer}: {type(error).__name__}: {error}"[:2000], file=sys.stderr, flush=True
            )
            continue
        rows += found
        if not args.json:
            for row in found:
                print(
                    f"{row['name']:<32} {row['kind']:<9} {row['kernel']:<16} {row['ours_ms'] * 1e3:9.2f} us "
                    f"{row['rate']:7.1f} {row['unit']:<7}  {row['peer']:<11} {row['peer_ms'] * 1e3:9.2f} us  "
                    f"ratio {row['ratio']:.3f}  error {row['error']:.1e}",
                    flush=True,
                )
    if args.json:
        print(json.dumps({"rows": rows}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

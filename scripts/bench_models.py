"""Whole models on one device beside torch and onnxruntime, with the same number of threads.

    python scripts/bench_models.py [MODEL ...] [--via torch,onnx] [--tuned] [--trials N] [--threads N] [--rounds N]
                                   [--breakdown N] [--cpu-time] [--work-dir D] [--json]
    python scripts/bench_models.py --compile 2,8,32 [--ways "device,packed,constants,let go,mesh"] [--json]

Models are those of `scripts/models_torch.py`, random weights in published shapes, imported by ``torch.export`` or from
the ONNX file that onnxruntime runs. Every result is checked against torch's; then all contestants run in turn in this
process, and a figure is the median of the rounds, with the least beside it. ratio = peer_ms / ours_ms.

``llama symbolic`` is the decoder of `scripts/models_symbolic.py`, compiled once for any number of tokens, at 1, 7 and
64 of them, beside what we compile for that number alone, and beside the others.

Without --tuned no record is looked for, and no candidate measured: what is timed are the schedules that kernels have
by default. --breakdown prints which of our kernels take the time. --cpu-time counts the process's own time, for
machines that others use as well; with --threads 1, since threads that spin count. It needs the extra `models`.

--compile measures no kernels, but compiling: a Llama-style decoder 1,024 wide with so many layers each, in processes of
their own (`scripts/compiling.py`): CPU seconds by pass, and the most memory beside the weights' bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compiling import WAYS

from tvm_axe.defaults import WORK_DIR

NAP, WARM, BLOCK = 0.25, 0.1, 0.3  # seconds; in a nap the other libraries' idle threads stop spinning
TOLERANCE = 2e-3  # of the largest element: float32 through a dozen layers
SYMBOLIC, TOKENS = "llama symbolic", (1, 7, 64)
PEERS = ("torch", "torch.compile", "onnxruntime")


def onnx_file(module: Any, inputs: Any) -> Path:
    """The model as an ONNX file in a folder of its own."""
    import torch

    path = Path(tempfile.mkdtemp(prefix="axe_models_"), "model.onnx")
    names = [f"input_{n}" for n in range(len(inputs))]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that this exporter is the older one; the other needs one package more
        torch.onnx.export(module, inputs, str(path), dynamo=False, input_names=names)
    return path


def imported(via: str, module: Any, inputs: Any, path: Path) -> Any:
    """The model in Relax, its weights constants."""
    import torch

    if via == "torch":
        from tvm.relax.frontend.torch import from_exported_program

        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return from_exported_program(torch.export.export(module, inputs))
    import onnx
    from tvm.relax.frontend.onnx import from_onnx

    return from_onnx(onnx.load(str(path)), keep_params_in_input=False)


def ours(model: Any, target: Any, arrays: list[Any], args: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    """The virtual machine of a model, and a call of it."""
    import tvm

    import tvm_axe as axe

    if args.tuned:
        axe.tune(model, target=target, trials=args.trials, work_dir=args.work_dir)
    vm = tvm.relax.VirtualMachine(
        axe.compile(model, target=target, work_dir=args.work_dir if args.tuned else None).vm, tvm.cpu()
    )
    return vm, called(vm, arrays)


def called(vm: Any, arrays: list[Any]) -> Callable[[], Any]:
    """A call of a virtual machine's ``main`` with these arrays."""
    import tvm

    tensors, main = [tvm.runtime.tensor(array) for array in arrays], vm["main"]
    return lambda: main(*tensors)


def peers(module: Any, inputs: Any, path: Path, wanted: list[str], threads: int) -> dict[str, Callable[[], Any]]:
    """Calls of the same model by others."""
    import torch

    calls: dict[str, Callable[[], Any]] = {}
    if "torch" in wanted:
        calls["torch"] = without_gradients(module, inputs)
    if "torch.compile" in wanted:
        calls["torch.compile"] = without_gradients(torch.compile(module), inputs)
    if "onnxruntime" in wanted:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        fed = {f"input_{n}": value.numpy() for n, value in enumerate(inputs)}
        fed = {name: fed[name] for name in (each.name for each in session.get_inputs())}
        calls["onnxruntime"] = lambda: session.run(None, fed)
    return calls


def without_gradients(module: Any, inputs: Any) -> Callable[[], Any]:
    import torch

    def call() -> Any:
        with torch.inference_mode():
            return module(*inputs)

    return call


def first_of(result: Any) -> Any:
    """The first result of a call, as numpy's."""
    while not hasattr(result, "shape"):
        result = result[0]
    return result.numpy() if hasattr(result, "numpy") else result


def check(name: str, got: Any, want: Any) -> None:
    """End the program if a result isn't torch's."""
    import numpy as np

    got, want = first_of(got), first_of(want)
    error = float(np.abs(got.astype("float64") - want).max() / np.abs(want).max())
    if not error < TOLERANCE:
        raise SystemExit(f"{name}: the result is wrong: {error:.2g} of the largest element")


def timed(
    calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, tuple[float, float]]:
    """The median and the least seconds of each call, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in list(calls.items()) * rounds:
        time.sleep(NAP)
        for budget in (WARM, BLOCK):
            start, took = time.perf_counter(), []
            while not took or time.perf_counter() - start < budget:
                begin = clock()
                call()
                took.append(clock() - begin)
        times[name] += took
    return {name: (statistics.median(series), min(series)) for name, series in times.items()}


def breakdown(vm: Any, call: Callable[[], Any], runs: int = 5) -> list[tuple[str, int, float]]:
    """Which functions take the time of a call: name, calls of it, milliseconds of all of them, the most first."""
    import tvm

    started: list[float] = []
    took: dict[str, list[float]] = defaultdict(list)

    def instrument(_func: Any, name: str, before: bool, _result: Any, *_args: Any) -> int:
        if before:
            started.append(time.process_time())
        else:
            took[name].append(time.process_time() - started.pop())
        return int(tvm.relax.VMInstrumentReturnKind.NO_OP)

    call()
    vm.set_instrument(instrument)
    for _ in range(runs):
        call()
    rows = [(name, len(each) // runs, 1e3 * sum(each) / runs) for name, each in took.items()]
    return sorted((row for row in rows if row[0] != "main"), key=lambda row: -row[2])


def bench(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way of importing a model and each peer."""
    from models_torch import made

    from tvm_axe.machines.target import resolve_target

    module, inputs = made(name)
    path, target = onnx_file(module, inputs), resolve_target("llvm", threads=args.threads)
    others = peers(module, inputs, path, args.peers, args.threads)
    want = without_gradients(module, inputs)()
    calls: dict[str, Callable[[], Any]] = {}
    for via in args.via:
        start = time.perf_counter()
        try:
            model = imported(via, module, inputs, path)
        except Exception as error:  # upstream's importers raise whatever an operator they don't know leads to
            print(f"{name}, via {via}: upstream's importer can't read it: {error}", file=sys.stderr, flush=True)
            continue
        vm, call = ours(model, target, [each.numpy() for each in inputs], args)
        print(f"{name}, via {via}: compiled in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        check(f"{name}, via {via}", call(), want)
        calls[f"ours via {via}"] = call
        if args.breakdown:
            print_breakdown(vm, call, args.breakdown)
    return rows_of(name, calls, others, args)


def print_breakdown(vm: Any, call: Callable[[], Any], count: int) -> None:
    """Print the kernels that take the most of a call's time."""
    for kernel, times, ms in breakdown(vm, call)[:count]:
        print(f"    {ms:9.3f} ms  {times:4} x {kernel}")
    vm.set_instrument(lambda *_: 0)


def rows_of(
    name: str, calls: dict[str, Callable[[], Any]], others: dict[str, Callable[[], Any]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each of our calls and each of the others', timed in turn."""
    seconds = timed(calls | others, args.rounds, time.process_time if args.cpu_time else time.perf_counter)
    return [
        {
            "name": f"{name}, {way}" if way else name,
            "ours_ms": 1e3 * seconds[way][0],
            "ours_least_ms": 1e3 * seconds[way][1],
            "peer": peer,
            "peer_ms": 1e3 * seconds[peer][0],
            "peer_least_ms": 1e3 * seconds[peer][1],
            "ratio": seconds[peer][0] / seconds[way][0],
            "ratio_of_least": seconds[peer][1] / seconds[way][1],
        }
        for way in calls
        for peer in others
    ]


def compiling(args: argparse.Namespace) -> None:
    """Print what compiling a decoder takes."""
    rows = []
    for way in args.ways:
        for layers in args.compile:
            script = str(Path(__file__).resolve().with_name("compiling.py"))
            done = subprocess.run([sys.executable, script, str(layers), way], check=True, stdout=subprocess.PIPE)
            rows.append(json.loads(done.stdout))
            row, took = rows[-1], rows[-1]["seconds"]
            passes = ", ".join(f"{name} {each:.1f}" for name, each in took.items() if each >= 0.05)
            line = f"{layers:3} layers, {way:10} memory {row['peak'] / 1e9:.2f} GB, {row['ratio']:.2f} of the weights'"
            print("" if args.json else f"{line}; CPU seconds: {passes}", end="" if args.json else "\n", flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))


def bench_symbolic(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of tokens and each peer, of one model for all of them."""
    import torch
    from models_symbolic import decoder
    from models_torch import made
    from tvm import tirx

    from tvm_axe.machines.target import resolve_target

    (module, _), target = made("llama prefill"), resolve_target("llvm", threads=args.threads)
    start, found = time.perf_counter(), []
    vm, _ = ours(decoder(module, tirx.Var("n", "int64")), target, [], args)
    print(f"{SYMBOLIC}: compiled in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    for tokens in TOKENS:
        inputs = (torch.randint(0, 8192, (1, tokens), generator=torch.Generator().manual_seed(0)),)
        others = peers(module, inputs, onnx_file(module, inputs), args.peers, args.threads)
        arrays = [inputs[0].numpy()[0]]
        call = called(vm, arrays)
        others = {"ours for that alone": ours(decoder(module, tokens), target, arrays, args)[1]} | others
        want = without_gradients(module, inputs)()
        for name, each in (("any number", call), ("that number alone", others["ours for that alone"])):
            check(f"{SYMBOLIC}, compiled for {name}, {tokens} tokens", each(), want)
        if args.breakdown:
            print_breakdown(vm, call, args.breakdown)
        found += rows_of(f"{SYMBOLIC}, {tokens} tokens", {"": call}, others, args)
    return found


def main() -> None:
    """Parse; compile and time; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of scripts/models_torch.py (default: all)")
    parser.add_argument(
        "--via", type=lambda text: text.split(","), default=["torch"], help="torch,onnx (default: torch)"
    )
    parser.add_argument("--peers", type=lambda text: text.split(","), default=["torch", "onnxruntime"], help="of them")
    parser.add_argument("--tuned", action="store_true", help="tune first; what --work-dir holds is used as it is")
    parser.add_argument("--trials", type=int, default=64, help="candidates for each kernel on average (default: 64)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every contestant (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are over so many (default: 5)")
    parser.add_argument("--breakdown", type=int, default=0, metavar="N", help="print the N kernels that take the most")
    parser.add_argument("--cpu-time", action="store_true", help="the process's time instead of the clock's")
    parser.add_argument("--work-dir", type=Path, default=Path(WORK_DIR, "bench-models"), help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser.add_argument("--compile", type=numbers, metavar="LAYERS", help="measure compiling, of so many layers each")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[*WAYS], help="of compiling, of them")
    args = parser.parse_args()
    if args.compile:
        if unknown := {*args.ways} - {*WAYS}:
            parser.error(f"no way {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
        compiling(args)
        return
    if unknown := {*args.peers} - {*PEERS} | {*args.via} - {"torch", "onnx"}:
        parser.error(f"no {', '.join(sorted(unknown))}; there are the peers {', '.join(PEERS)}, via torch and onnx")
    # Read when the libraries are loaded.
    os.environ["TVM_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from models_torch import MODELS

    known = [*MODELS, SYMBOLIC]
    if missing := {*args.models} - {*known}:
        parser.error(f"no model {', '.join(sorted(missing))}; there are {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    for name in args.models or known:
        found = bench_symbolic(args) if name == SYMBOLIC else bench(name, args)
        rows += found
        for row in [] if args.json else found:
            print(
                f"{row['name']:32} {row['ours_ms']:9.3f} ms ({row['ours_least_ms']:9.3f})   {row['peer']:14} "
                f"{row['peer_ms']:9.3f} ms ({row['peer_least_ms']:9.3f})   ratio {row['ratio']:.2f} "
                f"({row['ratio_of_least']:.2f})",
                flush=True,
            )
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()

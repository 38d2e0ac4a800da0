"""Whole models on several processes of one core each, beside one core and beside libraries with as many threads.

    python scripts/bench_models_mesh.py minilm "llama prefill" --devices 2 [--json]
    python scripts/bench_models_mesh.py minilm --counts

Untuned. Wall time of a call with its result fetched, in turns, medians; the machine has to have a core for each process
and nothing else to do. Every result is compared with torch's. --counts compares what runs on threads, instead, with the
same of collectives alone: kernels, collectives and barriers of a device, bytes that the busiest device receives, and
the process's CPU time of a call divided by the devices, which counts whoever spins at a barrier, too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from bench_models import PEERS, check, imported, onnx_file, peers, timed, without_gradients


def counted(exe: Any) -> dict[str, int]:
    """How often a shared model's first function starts a kernel, a collective, waits for all; and its bytes."""
    (name, function), *_ = exe.shared.functions.items()
    return {
        "kernels": sum(step.func is not None for step in function.steps),
        "collectives": sum(bool(step.kind) for step in function.steps),
        "barriers": exe.shared.module[name].script().count('"axe.barrier"'),
        "bytes": function.chosen.bytes,
    }


def counts(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for what runs of a model on a mesh, and one for the same of collectives alone."""
    from models_torch import made

    import tvm_axe as axe

    module, inputs = made(name)
    want, arrays = without_gradients(module, inputs)(), [each.numpy() for each in inputs]
    mesh = axe.Mesh({"tp": args.devices})
    exe = axe.compile(
        imported("torch", module, inputs, Path()), mesh=mesh, work_dir=None, keep=False
    )  # with its choices
    forms = {"fused": exe, "collectives": exe.apart()}
    with axe.launch(mesh, engine="threads") as workers, axe.launch(mesh, engine="threads") as others:
        calls = {}
        for (form, each), on in zip(forms.items(), (workers, others)):
            calls[form] = lambda each=each, on=on: each.run(on, *arrays)
            check(f"{name}, {form}", calls[form](), want)
        seconds = timed(calls, args.rounds, time.process_time)
    return [
        {"name": f"{name}, tp={args.devices}, {form}", **counted(each),
         "cpu_ms": 1e3 * seconds[form][0] / args.devices, "cpu_least_ms": 1e3 * seconds[form][1] / args.devices}
        for form, each in forms.items()
    ]  # fmt: skip


def times(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for one process on one core, and one for each library."""
    import numpy as np
    from models_torch import made

    import tvm_axe as axe

    module, inputs = made(name)
    want, arrays = without_gradients(module, inputs)(), [each.numpy() for each in inputs]
    model, mesh = imported("torch", module, inputs, Path()), axe.Mesh({"tp": args.devices})
    alone = axe.compile(model, target={"kind": "llvm", "num-cores": 1}, work_dir=None)
    exe = axe.compile(model, mesh=mesh, work_dir=None)
    path = onnx_file(module, inputs) if "onnxruntime" in args.peers else Path()
    others = peers(module, inputs, path, args.peers, args.devices)
    with axe.launch(mesh) as workers, exe.load(workers, {}) as shared, alone.load({}) as single:
        calls = {
            "ours": lambda: np.asarray(_first(shared.main(*arrays))),
            "one core": lambda: np.asarray(_first(single.main(*arrays))),
        } | others
        for each in ("ours", "one core"):
            check(f"{name}, {each}", calls[each](), want)
        seconds = timed(calls, args.rounds, time.perf_counter)
    own = seconds["ours"]
    return [
        {"name": f"{name}, {args.devices} processes", "ours_ms": 1e3 * own[0], "ours_least_ms": 1e3 * own[1],
         "peer": peer, "peer_ms": 1e3 * median, "peer_least_ms": 1e3 * least, "ratio": median / own[0],
         "ratio_of_least": least / own[1]}
        for peer, (median, least) in seconds.items() if peer != "ours"
    ]  # fmt: skip


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def main() -> None:
    """Parse; compile and time; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of scripts/models_torch.py (default: two)")
    parser.add_argument("--devices", type=int, default=2, help="processes, or threads with --counts (default: 2)")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=["torch", "onnxruntime"], help="of them")
    parser.add_argument("--rounds", type=int, default=5, help="medians are over so many (default: 5)")
    parser.add_argument("--counts", action="store_true", help="compare with the same of collectives alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if unknown := {*args.peers} - {*PEERS}:
        parser.error(f"no {', '.join(sorted(unknown))}; there are the peers {', '.join(PEERS)}")
    # Read when the libraries are loaded: each of our processes has a core, a library as many threads.
    os.environ["TVM_NUM_THREADS"], os.environ["OMP_NUM_THREADS"] = "1", str(args.devices)
    from models_torch import MODELS

    if missing := {*args.models} - {*MODELS}:
        parser.error(f"no model {', '.join(sorted(missing))}; there are {', '.join(MODELS)}")
    rows: list[dict[str, Any]] = []
    for name in args.models or ("minilm", "llama prefill"):
        rows += (found := (counts if args.counts else times)(name, args))
        for row in [] if args.json else found:
            print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()

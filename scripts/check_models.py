"""Whole models on one device and on meshes, beside torch: right in float32, float16 and bfloat16, and how shared.

    python scripts/check_models.py                              # all of them; some minutes each on a core
    python scripts/check_models.py minilm --types bfloat16 --via nn --meshes 2x2 [--layers 12] [--json]

Models are those of `scripts/models_torch.py` in published widths, of two layers, as `torch.export` and ONNX give them,
weights being constants, and written with `relax.frontend.nn` (`scripts/models_nn.py`), weights being loaded into a
session. Devices are threads. A row says of a model on a mesh

error
    The largest of its results' errors, as norms relative to torch's module in float64 with the same weights; beside it
    torch's own in the model's type. More than LARGEST is wrong, unless it is less than twice torch's: where a router
    takes another expert for a token than it does in float64, both are far off.
divided
    The part of the products' operations that devices share; and of them what each axis shares.

With --bytes nothing is run: a row says what the busiest device receives in a model of four layers, over Megatron's
closed form: two all-reduces a layer, each twice (n - 1)/n of the tokens' values, and once that for what comes before
the first (an embedding, patches or convolutions, whose sums are scattered or whose columns are gathered). Layers
needn't be alike. Where devices don't divide the heads the closed form of attention by rows is printed beside it: rows
are gathered, queries go from columns to rows, keys and values are gathered, and behind attention each device has the
output's rows (5 + 1/n of those units a layer where each holds the output's weight, 6 + 2/n where none does). And a
row says what a device holds of the weights, over 1/n of them, and of all.

The exit status is 0 if nothing is wrong. Needs the extra `models`.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
MESHES: dict[str, dict[str, int]] = {
    "1": {}, "2": {"tp": 2}, "3": {"tp": 3}, "4": {"tp": 4}, "2x2": {"dp": 2, "tp": 2},
}  # fmt: skip
VIA = ("torch", "onnx", "nn")
WIDTHS = {"minilm": (128, 384), "vit": (197, 192), "whisper": (1500, 384), "llama prefill": (64, 512),
          "llama decode": (1, 512), "moe prefill": (64, 256), "moe decode": (1, 256)}  # fmt: skip
"""Tokens and width of the transformers."""
HEADS = {"minilm": 12, "vit": 3, "whisper": 6}
"""Heads of those that have as many of keys as of queries."""
LAYERS = 4
"""Of a model whose bytes are counted."""


def as_array(tensor: Any) -> Any:
    """A torch tensor as numpy's array, of bfloat16 too."""
    import ml_dtypes
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.detach().float().numpy().astype(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def called(module: Any, inputs: Any) -> list[Any]:
    """The results of a torch module in float64."""
    import torch

    with torch.no_grad():
        results = module(*inputs)
    return [each.double().numpy() for each in (results if isinstance(results, tuple) else (results,))]


def imported(via: str, name: str, module: Any, inputs: Any, dtype: str) -> Any:
    """The model in Relax."""
    import torch
    from bench_models import imported as as_it_comes
    from bench_models import onnx_file
    from models_nn import exported
    from tvm.relax.frontend.torch import from_exported_program

    from tvm_axe.relax import torch_converters

    if via == "nn":
        return exported(name, module, inputs, dtype)
    if via == "onnx":
        return as_it_comes("onnx", module, inputs, onnx_file(module, inputs))
    with torch.no_grad():
        return from_exported_program(torch.export.export(module, inputs), custom_convert_map=torch_converters())


def error(found: Any, wanted: list[Any]) -> float:
    """The largest error of some results."""
    import numpy as np

    found = found if isinstance(found, (tuple, list)) else (found,)
    errors = [
        float(np.linalg.norm(np.asarray(got).astype("float64") - want) / np.linalg.norm(want))
        for got, want in zip(found, wanted, strict=True)
    ]
    return max(each if each == each else float("inf") for each in errors)


def rows(name: str, dtype: str, via: str, meshes: list[str], layers: int) -> Iterator[dict[str, Any]]:
    """What there is to be said of a model of a type on each mesh."""
    import torch
    from models_torch import made

    import tvm_axe as axe

    module, inputs = made(name, layers)
    kind = getattr(torch, dtype)
    module, inputs = module.to(kind), tuple(x.to(kind) if x.is_floating_point() else x for x in inputs)
    exact = copy.deepcopy(module).double(), [x.double() if x.is_floating_point() else x for x in inputs]
    want, own = called(*exact), error(called(module, inputs), called(*exact))
    row = {"model": name, "type": dtype, "via": via}
    try:
        model = imported(via, name, module, inputs, dtype)
    except Exception as raised:  # upstream's importers raise whatever an operator they don't know leads to
        if via == "nn":
            raise
        print(
            f"{name}, via {via}: upstream's importer can't read it: {str(raised).strip().splitlines()[-1]}", flush=True
        )
        return
    weights = {key: as_array(tensor) for key, tensor in module.state_dict().items()} if via == "nn" else None
    arrays = [as_array(each) for each in inputs]
    for mesh in meshes:
        start = time.process_time()
        exe: Any = axe.compile(model, mesh=MESHES[mesh] or None, work_dir=None, keep=False)
        if mesh == "1":
            got = exe(*arrays) if weights is None else exe.load(weights).main(*arrays)
        else:
            with axe.launch(MESHES[mesh], engine="threads") as workers:
                if weights is None:
                    got = exe.run(workers, *arrays)
                else:
                    with exe.load(workers, weights) as session:
                        got = session.main(*arrays)
                        got = [*map(as_numpy, got if isinstance(got, tuple) else (got,))]
        said = {}
        if mesh != "1":
            (function, *_) = exe.shared.functions.values()
            said = {"divided": function.chosen.divided, "line": exe.show().splitlines()[1]}
        yield {**row, "mesh": mesh, "error": error(got, want), "torch": own, **said,
               "seconds": time.process_time() - start}  # fmt: skip


def as_numpy(handle: Any) -> Any:
    """A handle's values, before its session ends."""
    import numpy as np

    return np.asarray(handle)


def moved(name: str, dtype: str, meshes: list[str]) -> Iterator[dict[str, Any]]:
    """What devices move in a transformer, and hold of its weights."""
    import torch
    from models_nn import exported
    from models_torch import made

    import tvm_axe as axe
    from tvm_axe.relax import share_model

    tokens, width = WIDTHS[name]
    module, inputs = made(name, LAYERS)
    kind = getattr(torch, dtype)
    model = exported(name, module, [x.to(kind) if x.is_floating_point() else x for x in inputs], dtype)
    for mesh in meshes:
        if len(MESHES[mesh]) != 1:
            continue
        chosen = share_model(model, axe.Mesh(MESHES[mesh])).functions["main"].chosen
        devices, size = MESHES[mesh]["tp"], {"float32": 4}.get(dtype, 2)
        unit = (devices - 1) / devices * tokens * width * size
        here, there = chosen.weights
        ratio = chosen.bytes / unit / (4 * LAYERS + 1)
        row = {"model": name, "type": dtype, "mesh": mesh, "divided": chosen.divided, "weights": here / there * devices,
               "part": here / there, "bytes": chosen.bytes, "megatron": ratio}  # fmt: skip
        if HEADS.get(name, devices) % devices:
            layer = 5 + 1 / devices, 6 + 2 / devices
            row["rows"] = [(each * LAYERS + 1) / (4 * LAYERS + 1) for each in layer]
        yield row


def main() -> int:
    """Parse; compile, run and compare; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of scripts/models_torch.py (default: all)")

    def some_of(known: Any) -> Any:
        def read(text: str) -> list[str]:
            found = text.split(",")
            if missing := {*found} - {*known}:
                parser.error(f"no {', '.join(sorted(missing))}; there are {', '.join(known)}")
            return found

        return read

    parser.add_argument("--types", type=some_of(LARGEST), default=[*LARGEST])
    parser.add_argument("--via", type=some_of(VIA), default=[*VIA])
    parser.add_argument("--meshes", type=some_of(MESHES), default=[*MESHES])
    parser.add_argument("--layers", type=int, default=2, help="of transformers (default: 2)")
    parser.add_argument("--bytes", action="store_true", help="say what is moved instead")
    parser.add_argument("--json", type=Path, help="where the rows are written, too")
    args = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("tvm_axe").setLevel(logging.ERROR)
    from models_nn import WRITTEN
    from models_torch import MODELS

    some_of(MODELS)(",".join(args.models or MODELS))
    made: list[dict[str, Any]] = []
    if args.bytes:
        for name in (name for name in args.models or MODELS if name in WIDTHS):
            for dtype in args.types:
                for row in moved(name, dtype, args.meshes):
                    made.append(row)
                    forms = " to ".join(f"{each:.3f}" for each in row.get("rows", ()))
                    print(
                        f"{name:13} {dtype:8} on {row['mesh']:3}  {row['bytes']:,} bytes, {row['megatron']:.3f} of "
                        f"Megatron's{f' (by rows {forms})' if forms else ''}; {row['divided']:.1%} divided; "
                        f"weights {row['weights']:.3f} of 1/n, {row['part']:.1%} of all",
                        flush=True,
                    )
        if args.json:
            args.json.write_text(json.dumps(made, indent=1), encoding="utf-8")
        return 0
    wrong = 0
    for name in args.models or MODELS:
        for via in args.via:
            for dtype in args.types:
                # Products of an ONNX file in 16 bits are sums of such; ResNet's batch norms are no module of nn's.
                if (via == "onnx" and dtype != "float32") or (via == "nn" and name not in WRITTEN):
                    continue
                for row in rows(name, dtype, via, args.meshes, args.layers):
                    made.append(row)
                    bad = not row["error"] < max(LARGEST[dtype], 2 * row["torch"])
                    wrong += bad
                    print(line(row) + ("  WRONG" if bad else ""), flush=True)
                    if args.json:
                        args.json.write_text(json.dumps(made, indent=1), encoding="utf-8")
    print(f"{len(made)} models and meshes, {wrong} wrong")
    return int(wrong > 0)


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    text = (
        f"{row['model']:13} {row['via']:5} {row['type']:8} on {row['mesh']:3}  {row['error']:.1e} ({row['torch']:.1e})"
    )
    if "divided" in row:
        text += f"  {row['divided']:.1%} divided"
    return text


if __name__ == "__main__":
    sys.exit(main())

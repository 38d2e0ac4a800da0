"""One decoder compiled, loaded and called once in a process of its own: CPU seconds by pass, and the peak of memory.

    python scripts/compiling.py LAYERS WAY     # prints one JSON object; scripts/bench_models.py --compile runs it

WAY is ``device`` (weights from a file), ``packed`` (the same, packed for the kernels), ``constants`` (weights are
constants of the model, which this process has made as well), ``let go`` (the same, and nobody has the model but who
compiles it) or ``mesh`` (two devices share the model). Memory is the most that was resident since the model was there,
beyond what was then, without its constants; of a mesh that of the launching process, into which the devices' tensors
are mapped.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAYS = ("device", "packed", "constants", "let go", "mesh")
SIZES = {"d": 1024, "heads": 16, "kv": 4, "f": 2816, "tokens": 16, "vocab": 4096}


def resident(field: str) -> int:
    """Bytes that are resident now (``VmRSS``) or have been at most (``VmHWM``)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])


def forget_peak() -> None:
    """Count the most that is resident from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@contextmanager
def seconds(into: dict[str, float], name: str) -> Iterator[None]:
    """Add the CPU seconds of this process and of children that have ended."""
    start = sum(os.times()[:4])
    yield
    into[name] = into.get(name, 0.0) + sum(os.times()[:4]) - start


def arrays(params: Any) -> Iterator[tuple[str, Any]]:
    """The names of parameters, and random weights."""
    import numpy as np

    random = np.random.default_rng(0)
    for param in params:
        shape = [int(extent) for extent in param.ty.shape.values]
        yield str(param.name), random.standard_normal(shape, "float32") * shape[-1] ** -0.5


def measured(layers: int, way: str) -> dict[str, Any]:
    """What compiling, loading and one call took."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "relax"))
    import numpy as np
    import tvm
    from shared_models import decoder

    import tvm_axe as axe
    from tvm_axe import executable, pipeline

    took: dict[str, float] = {}
    apply = pipeline.Pass.__call__

    def timed(self: pipeline.Pass, work: pipeline.Work) -> pipeline.Work:
        with seconds(took, self.name):
            return apply(self, work)

    pipeline.Pass.__call__ = timed  # type: ignore[method-assign]
    model = decoder(layers=layers, **SIZES)
    params, count = list(model["forward"].params), int(model["forward"].attrs["num_input"])
    shapes = [[int(extent) for extent in param.ty.shape.values] for param in params]
    weights = sum(4 * int(np.prod(shape)) for shape in shapes[count:])
    inputs = [np.ones(shape, str(param.ty.dtype)) for shape, param in zip(shapes, params[:count])]
    path = Path(tempfile.mkdtemp(prefix="axe_compiling_"), "model.safetensors")
    before = resident("VmRSS")
    if way in ("constants", "let go"):
        bound = {name: tvm.runtime.tensor(array) for name, array in arrays(params[count:])}
        model = tvm.relax.transform.BindParams("forward", bound)(model)
        del bound
    else:
        same = {str(p.name): np.broadcast_to(np.float32(0.01), shape) for p, shape in zip(params, shapes)}
        executable.write_safetensors(path, {str(p.name): same[str(p.name)] for p in params[count:]})
    forget_peak()
    with seconds(took, "all of compiling"):
        mesh = {"tp": 2} if way == "mesh" else None
        given = [model]
        if way == "let go":
            del model
        exe = axe.compile(given.pop(), mesh=mesh, work_dir=None, pack_weights=way == "packed")
    compiled = resident("VmHWM") - before
    with seconds(took, "loading and a call"):
        if way == "mesh":
            with axe.launch({"tp": 2}) as workers, exe.load(workers, path) as session:
                session.forward(*inputs)
        elif way in ("constants", "let go"):
            with exe.load() as session:
                session.forward(*inputs)
        else:
            with exe.load(path) as session:
                session.forward(*inputs)
    path.unlink(missing_ok=True)
    path.parent.rmdir()
    peak = resident("VmHWM") - before
    return {
        "layers": layers, "way": way, "weights": weights, "seconds": took, "peak_compiled": compiled, "peak": peak,
        "ratio": peak / weights,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measured(int(sys.argv[1]), sys.argv[2])))

"""Every annotation and attribute that a scheduled function carries, in one place.

==================== ================ =================================================================
key                  where            value
==================== ================ =================================================================
``axe.bind``         a loop           the mesh axis whose devices share the loop's iterations. On a
                                      data-parallel loop, each device runs the iteration of its own
                                      coordinate. On a reduction loop, each device runs them all and
                                      reads the peers: a cross-device reduction.
``axe.root``         a block          the coordinate of the one device that runs this cross-device
                                      reduction and holds its result
``axe.overlap``      a loop           its iterations are chunks; neighbouring stages with the same value
                                      are run chunk by chunk, one stage's beside the other's
``axe.ring``         a loop           a mesh axis: each device runs the iterations in an order of its own,
                                      so that at no time two devices want the same one
``axe.layouts``      the function     buffer name -> canonical text of the `Layout` in which that
                                      parameter arrives (or, for an output, is left)
``axe.layouts.NAME`` a block          the same for the parameter NAME, which the block writes, where a
                                      schedule says it (not on the root block: upstream then changes
                                      copies of the schedule too)
``axe.beside``       a block          the collective that it is runs beside what doesn't depend on it
``axe.inserted``     a block          it was inserted to move what a device touches and doesn't own: what
                                      for, in words
``axe.tile``         a block          the kernel of `tvm_axe.tile.kernels` that computes it
``axe.tile.NAME``    a block          a parameter of that kernel, an int
``axe.kernel``       the function     the kernel of `tvm_axe.tile.kernels` that computes all of it, on its
                                      parameters in their order
``axe.kernel.NAME``  the function     what the kernel is asked for: an int, a string, a bool or a float
``axe.program``      the function     the tile program that it stands for, as JSON
                                      (`tvm_axe.tile.tunable`)
``axe.knob.NAME``    a block          what the knob NAME of the tile program is, an int
``axe.waits``        the function     its GPU kernels wait for what was launched before them, and so may be
                                      launched while that still runs
``axe.aligned.NAME`` the function     bytes, of which a GPU's kernels take the address of the parameter NAME
                                      to be a multiple
``axe.drops_nan``    the function     its maxima needn't keep a NaN (`tvm_axe.analysis.shifted`)
``axe.linked``       the function     it is one worker's: 1 if it has addresses of its process in it, else 0
==================== ================ =================================================================

All are plain strings or ints, so that they survive printing, traces and JSON, and an int may be one that MetaSchedule
sampled. A compiler that ignores them sees an ordinary
function over whole tensors with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm_ffi
from tvm import s_tir
from tvm.tirx import PrimFunc

from tvm_axe.errors import LayoutError
from tvm_axe.layout import Layout

BIND = "axe.bind"
ROOT = "axe.root"
OVERLAP = "axe.overlap"
RING = "axe.ring"
BESIDE = "axe.beside"
INSERTED = "axe.inserted"
LAYOUTS = "axe.layouts"
TILE = "axe.tile"
KERNEL = "axe.kernel"
PROGRAM = "axe.program"
KNOB = "axe.knob"
WAITS = "axe.waits"
LINKED = "axe.linked"
DROPS_NAN = "axe.drops_nan"
ALIGNED = "axe.aligned"


def with_layouts(func: PrimFunc, layouts: Mapping[str, Layout | str]) -> PrimFunc:
    """Declare the layouts in which parameters of `func` arrive, or results are left.

    Parameters
    ----------
    func : PrimFunc
        A function over whole tensors.
    layouts : Mapping[str, Layout or str]
        Layout (or its canonical text) by parameter name. Later calls add to earlier ones.

    Returns
    -------
    PrimFunc
        A copy of `func` with these layouts attached.

    Raises
    ------
    LayoutError
        If a name isn't a buffer parameter of `func`, or a text doesn't parse.

    Examples
    --------
    >>> from tvm.script import tirx as T
    >>> @T.prim_func(s_tir=True)
    ... def double(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
    ...     for i in range(8):
    ...         with T.sblock("B"):
    ...             vi = T.axis.spatial(8, i)
    ...             B[vi] = A[vi] * T.float32(2)
    >>> {name: str(layout) for name, layout in layouts_of(with_layouts(double, {"A": "S[(2, 4) : (1@tp, 1)]"})).items()}
    {'A': 'S[(2, 4) : (1@tp, 1)]'}
    """
    names = [param.name for param in func.params]
    for name in layouts:
        if name not in names:
            raise LayoutError(f"with_layouts: {name!r} is not a parameter; the parameters are {', '.join(names)}")
    texts = {name: str(layout) for name, layout in layouts_of(func).items()}
    for name, layout in layouts.items():
        texts[name] = str(layout if isinstance(layout, Layout) else Layout.parse(layout))
    # Functions that share a body aren't safe: upstream's schedule takes a body for its own and changes it in both.
    return s_tir.renew_defs(func.with_attr(LAYOUTS, texts))


def layouts_of(func: PrimFunc) -> dict[str, Layout]:
    """Return the layouts of `func`'s parameters by name, empty where none is attached. A schedule's word comes last."""
    attached = func.attrs[LAYOUTS] if func.attrs and LAYOUTS in func.attrs else {}
    texts = {str(name): str(text) for name, text in attached.items()}
    prefix = f"{LAYOUTS}."

    def on_block(block: s_tir.SBlock) -> None:
        for key, text in block.annotations.items():
            if str(key).startswith(prefix):
                texts[str(key).removeprefix(prefix)] = str(text)

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, on_block))
    return {name: Layout.parse(text) for name, text in texts.items()}

"""`tvm-axe layout`: pictures of layouts."""

from __future__ import annotations

import argparse
import re

from tvm_axe.cli.command import Command, Group
from tvm_axe.errors import InputError

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layout", metavar="LAYOUT", help='such as "S[(2, 4, 8) : (1@tp, 8, 1)]"')
    parser.add_argument("--shape", required=True, metavar="MxN", help="the tensor's shape, such as 8x16")
    parser.add_argument(
        "--mesh", metavar="AXIS=SIZE,...", help="devices by mesh axis; default: what the layout reaches"
    )
    parser.add_argument(
        "--kind",
        help="mesh (devices), threads (the place of each element), banks (shared memory) or coalescing (global "
        "memory); default: what the layout's axes suggest",
    )
    parser.add_argument(
        "--dtype", default="float32", help="for banks and coalescing: the elements (default: %(default)s)"
    )
    parser.add_argument(
        "--access",
        default="row",
        metavar="row|column|LAYOUT",
        help="for banks and coalescing: which elements a warp touches at once; a layout gives lanes their registers "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--vector", type=int, default=1, help="for banks and coalescing: elements a lane takes at once (default: 1)"
    )
    parser.add_argument("--svg", metavar="FILE", help="write the picture as SVG, too")
    parser.add_argument("--html", metavar="FILE", help="write the picture as a page of HTML, too")


def _show(args: argparse.Namespace) -> None:
    """`tvm-axe layout show`"""
    from tvm_axe.layout.draw import show
    from tvm_axe.layout.layout import Layout
    from tvm_axe.layout.memory import Access
    from tvm_axe.layout.mesh import Mesh
    from tvm_axe.layout.swizzle import ComposeLayout

    text = args.layout.strip()
    layout = ComposeLayout.parse(text) if text.startswith("ComposeLayout") else Layout.parse(text)
    mesh = Mesh.parse(args.mesh) if args.mesh is not None else None
    lanes = args.access if args.access in ("row", "column") else Layout.parse(args.access)
    picture = show(layout, _shape(args.shape), mesh, args.kind, Access(args.dtype, lanes, args.vector))
    for path, form in ((args.svg, picture.svg), (args.html, picture.html)):
        if path is not None:
            try:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(form())
            except OSError as error:
                raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    print(picture.text())


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]{1,18}(x[0-9]{1,18})*", text):
        raise InputError(f"--shape must be extents joined by x, such as 8x16, not {text!r}")
    return tuple(map(int, text.split("x")))


COMMAND = Group(
    "layout",
    "draw a layout",
    (Command("show", "draw who owns what, bank conflicts, or coalescing", _add_arguments, _show),),
)

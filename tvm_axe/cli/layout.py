"""`tvm-axe layout`: layouts on the command line."""

from __future__ import annotations

import argparse
import re

from tvm_axe.errors import InputError
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.swizzle import ComposeLayout


def add_layout_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `layout show` to a parser's commands.

    Parameters
    ----------
    subparsers
        What `add_subparsers` returned. As with every command, ``args.command(args)`` runs it and prints to stdout; what
        the user got wrong is raised as an AxeError.
    """
    parser = subparsers.add_parser("layout", help="draw a layout")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    show = commands.add_parser("show", help="draw who owns what, bank conflicts, or coalescing")
    show.add_argument("layout", metavar="LAYOUT", help='such as "S[(2, 4, 8) : (1@tp, 8, 1)]"')
    show.add_argument("--shape", required=True, metavar="MxN", help="the tensor's shape, such as 8x16")
    show.add_argument("--mesh", metavar="AXIS=SIZE,...", help="devices by mesh axis; default: what the layout reaches")
    show.add_argument(
        "--kind",
        help="mesh (devices), threads (the place of each element), banks (shared memory) or coalescing (global "
        "memory); default: what the layout's axes suggest",
    )
    show.add_argument(
        "--dtype", default="float32", help="for banks and coalescing: the elements (default: %(default)s)"
    )
    show.add_argument(
        "--access",
        default="row",
        metavar="row|column|LAYOUT",
        help="for banks and coalescing: which elements a warp touches at once; a layout gives lanes their registers "
        "(default: %(default)s)",
    )
    show.add_argument(
        "--vector", type=int, default=1, help="for banks and coalescing: elements a lane takes at once (default: 1)"
    )
    show.add_argument("--svg", metavar="FILE", help="write the picture as SVG, too")
    show.add_argument("--html", metavar="FILE", help="write the picture as a page of HTML, too")
    show.set_defaults(command=_show)


def _show(args: argparse.Namespace) -> None:
    """`tvm-axe layout show`"""
    from tvm_axe.layout.draw import show
    from tvm_axe.layout.memory import Access

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

"""`tvm-axe cache`: compiled kernels and programs on disk."""

from __future__ import annotations

import argparse

from tvm_axe.cli.command import Command

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="remove them")


def _cache(args: argparse.Namespace) -> None:
    """`tvm-axe cache`"""
    from tvm_axe.machines.cache import Cache

    cache = Cache()
    if args.clear:
        print(f"{cache.folder}: {cache.clear()} compiled kernels and programs removed")
        return
    entries = cache.entries()
    print(
        f"{cache.folder}: {len(entries)} compiled kernels and programs, {sum(size for _, size, _ in entries):,} bytes"
    )


COMMAND = Command("cache", "compiled kernels and programs on disk: where, how many, how large", _add_arguments, _cache)

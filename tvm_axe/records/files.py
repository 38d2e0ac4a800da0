"""Writing files that several processes share, in a way that a crash, a kill or a full disk leaves in order."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tvm_axe.errors import TuneError

__all__ = ["LOCK", "append_line", "ends_well", "locked", "needed", "replace_file"]

LOCK = ".lock"


@contextlib.contextmanager
def needed(folder: Path) -> Iterator[None]:
    """Have an `OSError` in the block say that this work directory can't be used, and why.

    Raises
    ------
    TuneError
        In its place.
    """
    try:
        yield
    except OSError as error:
        raise TuneError(
            f"work_dir: {folder} cannot be used: {error.strerror}; a folder to write in is needed"
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if needed, and keep every other process and thread that asks for its lock waiting.

    The lock ends with the process, however that ends; its file ``.lock`` stays and means nothing. It is not reentrant.

    Raises
    ------
    TuneError
        If the folder cannot be made or written.
    """
    with needed(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def append_line(path: Path, line: str) -> None:
    """Append a line, on disk when this returns; either all of it is there or, on an error, nothing.

    Only a process that is killed within the write leaves a part of it, without an end: `ends_well` tells. To be called
    with the folder's lock held.

    Raises
    ------
    TuneError
        If it cannot be written, such as on a full disk.
    """
    rest = memoryview(f"{line}\n".encode())
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            try:
                while rest:
                    rest = rest[os.write(handle, rest) :]
                os.fsync(handle)
            except BaseException:
                os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)
        if size == 0:
            _sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader, a crash, or an error leaves either the old or the new contents.

    To be called with the folder's lock held: two writers would share the draft.

    Raises
    ------
    TuneError
        If it cannot be written, such as on a full disk.
    """
    draft = path.with_name(f"{path.name}.new")
    try:
        try:
            with open(draft, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error


def ends_well(path: Path) -> bool:
    """Whether what is appended to the file next is a line of its own."""
    try:
        with open(path, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return True
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except FileNotFoundError:
        return True


def _sync_folder(folder: Path) -> None:
    """Put the names of new files on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(path: Path, error: OSError) -> TuneError:
    return TuneError(
        f"{path}: cannot be written: {error.strerror}; it is as it was before, so that once there is room and "
        "permission the same call goes on from there"
    )

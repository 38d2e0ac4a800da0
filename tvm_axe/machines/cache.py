"""Compiled kernels and programs on disk, by the content of what they were compiled from.

A file's name is the hash of everything that its contents depend on (`key`), so that nothing in the folder is ever out
of date and several processes may use it at once. It starts with the hash of the rest, so that what a full disk or a
crash leaves behind is told from an artifact, dropped and made again. Above the limit, what was used longest ago goes.

The folder is ``$TVM_AXE_CACHE``, or ``tvm_axe`` in ``$XDG_CACHE_HOME``, or ``~/.cache/tvm_axe``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from tvm_axe.errors import InputError

FOLDER = "TVM_AXE_CACHE"
"""Environment variable: the folder, instead of ``tvm_axe`` in the user's cache folder."""

LIMIT = 1 << 30
"""Bytes that a cache may hold."""

PATIENCE = 300.0
"""Seconds that one waits for another to make an artifact, who may have been stopped; then it is made here, too."""

_LOG = logging.getLogger("tvm_axe")
_DIGEST = hashlib.sha256().digest_size
_SUFFIX = ".kernel"
_LOCK, _DRAFT = ".lock-", ".tmp"  # what the names of files that are no artifacts start with
_LOOK = 0.02  # seconds between looks at a lock that another holds


def key(*parts: str | bytes) -> str:
    """A name for what is made out of `parts`, in their order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class Cache:
    """A folder of artifacts.

    Parameters
    ----------
    folder : Path or str, optional
        Where it is; made at the first `put`. See the module for the default.
    limit : int
        Bytes that it may hold.
    """

    def __init__(self, folder: Path | str | None = None, limit: int = LIMIT) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.limit = limit

    def get_or_make(self, name: str, make: Callable[[], bytes], most: int | None = None) -> bytes:
        """The artifact of that name, made if there is none, and kept if it has no more than `most` bytes.

        If another thread or process is making it, that one is waited for.
        """
        found = self.get(name)
        if found is not None:
            return found
        with self._alone(name):
            found = self.get(name)  # what the one before has made
            if found is None:
                found = make()
                if most is None or len(found) <= most:
                    self.put(name, found)
            return found

    def get(self, name: str) -> bytes | None:
        """The artifact of that name; None if there is none, or a broken one, which is said and removed."""
        path = self._path(name)
        try:
            data = path.read_bytes()
            os.utime(path)  # the time of its last use
        except OSError:  # there is none, another process has just removed it, or the folder can't be read
            return None
        digest, contents = data[:_DIGEST], data[_DIGEST:]
        if hashlib.sha256(contents).digest() == digest:
            return contents
        _LOG.warning("%s is damaged: what it held is made again", path)
        self.drop(name)
        return None

    def drop(self, name: str) -> None:
        """Remove the artifact of that name, if it is there and can be removed."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def put(self, name: str, contents: bytes) -> None:
        """Keep an artifact; other processes see all of it or nothing.

        A folder that cannot be written is said in a warning: what was compiled is good without it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=_DRAFT, delete=False) as file:
                draft = Path(file.name)
                try:
                    file.write(hashlib.sha256(contents).digest() + contents)
                    file.flush()
                    os.replace(draft, self._path(name))
                except BaseException:
                    draft.unlink()
                    raise
        except OSError as error:
            warnings.warn(
                f"{self.folder}: compiled kernels cannot be kept there: {error.strerror}; set {FOLDER} to a folder "
                "that can be written",
                stacklevel=2,
            )
            return
        self._shrink(self._path(name))

    def entries(self) -> list[tuple[Path, int, float]]:
        """Each artifact's file, its bytes and the time of its last use, that longest ago first."""
        found = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                status = path.stat()
                found.append((path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry[2])

    def clear(self) -> int:
        """Remove every artifact, and what writers that were killed left behind; returns how many artifacts there were.

        Raises
        ------
        InputError
            If one cannot be removed.
        """
        entries = self.entries()
        try:
            left = [path for prefix in (_DRAFT, _LOCK) for path in self.folder.glob(f"{prefix}*")]
            for path in [path for path, *_ in entries] + left:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{error.filename}: cannot be removed: {error.strerror}") from error
        return len(entries)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Hold the lock of a name, where there can be one and nobody keeps it for too long."""
        path = self.folder / f"{_LOCK}{name}"
        held, deadline = None, time.monotonic() + PATIENCE
        with contextlib.suppress(OSError):  # the folder can't be written, or has no locks, as some of a network
            self.folder.mkdir(parents=True, exist_ok=True)
            while held is None and time.monotonic() < deadline:
                held = _locked(path)
                if held is None:
                    time.sleep(_LOOK)
        try:
            yield
        finally:
            if held is not None:
                with contextlib.suppress(OSError):  # somebody has cleared the folder
                    path.unlink()
                # A process that was forked meanwhile has the descriptor, too, so closing alone would not end the lock.
                fcntl.flock(held, fcntl.LOCK_UN)
                os.close(held)

    def _shrink(self, newest: Path) -> None:
        entries = self.entries()
        size = sum(bytes_ for _, bytes_, _ in entries)
        for path, bytes_, _ in entries:
            if size <= self.limit:
                return
            if path != newest:
                with contextlib.suppress(OSError):
                    path.unlink()
                size -= bytes_

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def _locked(path: Path) -> int | None:
    """A descriptor of the file, locked; None while another has the lock.

    Who has it removes the file in the end, so the lock counts only if the file is still the one of that name.
    """
    descriptor, kept = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept = os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        kept = False
    finally:
        if not kept:
            os.close(descriptor)
    return descriptor if kept else None


def default_folder() -> Path:
    """Where compiled kernels are kept; see the module."""
    if own := os.environ.get(FOLDER):
        return Path(own)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tvm_axe"

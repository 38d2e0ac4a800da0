"""Two hosts on one machine: `a` and `b`, each in namespaces of its own, with a cable between them.

Each has a network with one address besides the loopback, a name, a /dev/shm and System V memory of its own, and `b` its
own process ids, by which the package tells machines apart (`Rank.machine`) and UCX who shares memory. `a` keeps this
machine's process ids, as from there `b` has to be entered: what stands for ``ssh`` is a script that does that. Nothing
of it has a name that could be left behind: the namespaces go with the two processes that hold them, and these with the
tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
_LAUNCHER = """#!/bin/sh
while [ $# -gt 0 ]; do case $1 in -o) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift
case $host in
{cases}
*) echo "ssh: Could not resolve hostname $host" >&2; exit 255;;
esac
"""


class TwoHosts:
    """The two hosts, while they are there.

    Attributes
    ----------
    launcher : str
        The path of what takes the arguments of ``ssh``.
    """

    def __init__(self, folder: Path, entering: dict[str, list[str]], own: int) -> None:
        self._entering = entering
        self._own = own
        self.launcher = str(folder / "ssh")
        cases = "\n".join(
            f'{host} | {ADDRESSES[host]}) exec {" ".join(enter)} /bin/sh -c "$*";;' for host, enter in entering.items()
        )
        Path(self.launcher).write_text(_LAUNCHER.format(cases=cases))
        os.chmod(self.launcher, 0o755)

    def run(self, host: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run Python on a host, in a folder."""
        command = [*self._entering[host], f"--wd={folder}", sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    def left(self) -> list[str]:
        """The programs that run on `b`, but for what holds it."""
        space = os.stat(f"/proc/{self._own}/ns/pid").st_ino
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(folder / "ns/pid").st_ino == space and folder.name != str(self._own):
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
        return found


def _needs(command: list[str], what: str) -> None:
    """Skip the tests if this machine doesn't let them do something."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{what} needs {command[0]}, which isn't there")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{what} isn't permitted: {' '.join(command)}: {done.stderr.strip()}")


_SPACES = {"a": ["--net", "--mount", "--uts", "--ipc"]}
_SPACES["b"] = [*_SPACES["a"], "--pid", "--fork", "--kill-child", "--mount-proc"]


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Have two hosts, or skip the tests with the reason; a folder for files of theirs."""
    _needs(["unshare", *_SPACES["b"], "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], "a host in namespaces of its own")
    _needs(["ip", "link", "show", "lo"], "a cable between two hosts")
    _needs(["nsenter", "--version"], "to enter a host")
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {host}\n" for host, ip in ADDRESSES.items()))
    with contextlib.ExitStack() as stack:
        entering, pids = {}, {}
        for host, spaces in _SPACES.items():
            begin = f"mount -t tmpfs tmpfs /dev/shm && mount --bind {names} /etc/hosts && hostname {host}"
            holder = stack.enter_context(
                subprocess.Popen(
                    ["unshare", *spaces, "sh", "-c", f"{begin} && ip link set lo up && echo up && exec cat >/dev/null"],
                    stdin=subprocess.PIPE,  # it ends with it, so with these tests, however they end
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(holder.kill)
            assert holder.stdout is not None
            assert holder.stdout.readline() == "up\n"
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
            pids[host] = int(children[0]) if "--fork" in spaces else holder.pid
            flags = ["-m", "-u", "-i", "-n", *(["-p"] if "--pid" in spaces else [])]
            entering[host] = ["nsenter", "-t", str(pids[host]), *flags]
        cable = ["ip", "link", "add", "eth0", "netns", str(pids["a"]), "type", "veth", "peer", "eth0"]
        _needs([*cable, "netns", str(pids["b"])], "a cable between two hosts")
        for host, ip in ADDRESSES.items():
            for command in (["addr", "add", f"{ip}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                subprocess.run([*entering[host], "ip", *command], check=True)
        found = TwoHosts(folder, entering, pids["b"])
        yield found
        deadline = time.monotonic() + 5
        while found.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not found.left(), "a rank outlives its job"

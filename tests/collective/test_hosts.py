"""Jobs on several hosts: how ranks are dealt out, what is said of hosts that aren't as they must be, and jobs of both
engines on two hosts of this machine (namespaces.py), by what the command line starts there.
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from namespaces import ADDRESSES, TwoHosts, two_hosts

from tvm_axe.cli import elsewhere
from tvm_axe.collective import start
from tvm_axe.collective.dealing import Host, deal, is_here, known_as
from tvm_axe.collective.hosts import commands
from tvm_axe.collective.reaching import Answer, ask, check
from tvm_axe.collective.start import ranks_command
from tvm_axe.demo.baseline import Problem
from tvm_axe.demo.block import INNER, OUTER, TOKENS
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

HERE = Path(__file__).parent
DEMO = HERE / "demo_on_hosts.py"
FAR = "far.invalid"  # a name that is nobody's (RFC 2606)


# ---- Which ranks are where ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("a,b,c", "mesh tp=4 has 4 devices, which 3 hosts can't share evenly"),
        ("", "which 0 hosts can't share evenly"),
        ("a:3,b:2", "mesh tp=4 has 4 devices, and a:3,b:2 has 5 ranks"),
        ("a:3,b:none", "'b:none' must have a number of ranks behind the colon"),
        ("a:0,b:4", "'a:0' must have a number"),
        ("a,-oProxyCommand=x", "names no host"),
        ("a,::1", "names no host"),
        ("a:3,a:1", "names a host twice, and then all have as many ranks"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(hosts: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        deal([host for host in hosts.split(",") if host], Mesh({"tp": 4}))


def test_who_is_here() -> None:
    assert is_here("localhost") and is_here("127.0.0.1")
    assert not is_here(FAR) and not is_here("192.0.2.1")
    assert known_as(["localhost", "127.0.0.1"]) == "127.0.0.1"
    assert known_as(["localhost", FAR]) == socket.getfqdn()  # as nobody knows the way there


def test_what_is_started_on_other_hosts() -> None:
    """Through ssh, with the job's variables and nothing that a shell would take apart."""
    told = commands(deal(["localhost", FAR, "b.invalid"], Mesh({"tp": 6})), ["python", "a b.py"], 4321, "job")
    assert [command[0] for command, _ in told] == ["python"] * 2 + ["ssh"] * 4
    assert told[1][1]["RANK"] == "1" and told[1][1]["LOCAL_RANK"] == "1" and told[1][1]["LOCAL_WORLD_SIZE"] == "2"
    *options, host, line = told[2][0][1:]
    assert "BatchMode=yes" in options and host == FAR
    assert "RANK=2" in line and "MASTER_PORT=4321" in line and line.endswith("python 'a b.py'")
    assert "TVM_AXE_RANKS_PER_HOST" not in line
    again = commands(deal(["localhost", "localhost"], Mesh({"tp": 4})), ["python"], 4321, "job")
    assert again[3][1]["TVM_AXE_RANKS_PER_HOST"] == "2" and again[3][1]["MASTER_ADDR"] == "127.0.0.1"
    uneven = commands(deal([f"{FAR}:3", "b.invalid"], Mesh({"tp": 4})), ["python"], 4321, "job", "starter")
    assert [command[-2] for command, _ in uneven] == [FAR] * 3 + ["b.invalid"] and uneven[0][0][0] == "starter"
    assert "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1" in uneven[3][0][-1] and f"MASTER_ADDR={FAR}" in uneven[3][0][-1]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("HYDRA build details:", ["-hosts", "a:3,b:1", "-launcher", "ssh", "-launcher-exec", "starter"]),
        ("mpiexec (Open MPI) 5.0.8", ["--host", "a:3,b:1", "--mca", "plm_rsh_agent", "starter", "-x", "PYTHONPATH"]),
        ("Some MPI 1.0", None),
    ],
)
def test_what_mpiexec_is_told(
    version: str, expected: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "mpiexec"
    fake.write_text(f"#!/bin/sh\necho '{version}'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(start, "mpiexec", lambda: str(fake))
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    hosts = [Host("a", 3), Host("b", 1)]
    if expected is None:
        with pytest.raises(InputError, match=r"neither MPICH's mpiexec nor Open MPI's \(Some MPI 1.0\)"):
            ranks_command(4, ["program"], hosts, "starter")
        assert ranks_command(4, ["program"]) == [str(fake), "-n", "4", "program"]
        return
    command = ranks_command(4, ["program"], hosts, "starter")
    assert set(expected) <= set(command)
    assert not {"starter", "-launcher", "--mca"} & set(ranks_command(4, ["program"], hosts))


# ---- Hosts that aren't as they must be ------------------------------------------------------------------------------


def launcher(folder: Path, does: str) -> str:
    """What stands for ssh; it finds the host in $5 and the command in $6."""
    file = folder / "launcher"
    file.write_text(f"#!/bin/sh\n{does}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("does", "fault", "remedy"),
    [
        ("echo Permission denied >&2; exit 255", "not reached by .*launcher: Permission denied", "without a question"),
        ("sleep 3", "no answer in 1 s", "must come to its end"),
        ("sleep 3 & sleep 3", "no answer in 1 s", "must come to its end"),
        ('cd /; exec /bin/sh -c "$(echo "$6" | sed \'s:cd [^ ]*:cd /no/folder:\')"', "no folder ", "same paths"),
        ('exec /bin/sh -c "$(echo "$6" | sed \'s:-x [^ ]*:-x /no/python:\')"', "no .*python.* there", "same path"),
        ("exit 3", "^exit status 3$", "^$"),
        ("echo ModuleNotFoundError >&2; exit 1", "^ModuleNotFoundError$", "^$"),
    ],
)
def test_what_is_wrong_with_a_host_is_said(does: str, fault: str, remedy: str, tmp_path: Path) -> None:
    """Of each, while the others answer."""
    (answer,) = ask([FAR], [sys.executable, "-c", ""], launcher(tmp_path, does), seconds=1).values()
    assert re.search(fault, answer.fault), answer
    assert re.search(remedy, answer.remedy), answer


def test_a_launcher_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{FAR}: /no/launcher can't be started: .*tvm-axe doctor --hosts localhost,"):
        check(["localhost", FAR], [sys.executable], "/no/launcher")


def test_hosts_are_asked_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/a b")
    says = [sys.executable, "-c", "import os; print(os.getcwd(), os.environ['PYTHONPATH'])"]
    answers = ask([FAR, "localhost", FAR], says, launcher(tmp_path, 'cd /; env -i /bin/sh -c "$6"'))
    assert answers == dict.fromkeys([FAR, "localhost"], Answer(f"{tmp_path} /a b\n"))


def report(**changes: str) -> str:
    """What a doctor says, with other versions."""
    versions = {"python": "3.11.7", "tvm-axe": "0.1.0", "apache-tvm": "0.27.0", "mpi4py": "4.1.2", **changes}
    cpu, library = versions.pop("cpu", "x86_64 znver5"), versions.pop("library", "MPICH Version: 5.0.2")
    findings = [{"what": "MPI library", "state": library, "remedy": None}]
    reached = [{"what": "way back", "state": "yes", "remedy": None}]
    return "Welcome!\n" + json.dumps(
        {"versions": versions, "cpu": cpu, "engines": {"mpi": findings, "ranks": findings[:0]}, "reach": reached}
    )


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({}, None, None),
        ({"python": "3.11.9"}, None, None),
        ({"python": "3.10.2"}, "python", "Python 3.11 there"),
        ({"tvm-axe": "0.0.9"}, "tvm-axe", "pip install tvm-axe==0.1.0 there"),
        ({"mpi4py": "3.1.0"}, "mpi4py", "pip install mpi4py==4.1.2 there"),
        ({"library": "Open MPI v5.0.8"}, "MPI library", "the MPI library of a there"),
        ({"cpu": "x86_64 haswell"}, "cpu", "kernels are compiled for rank 0's"),
    ],
)
def test_differences_are_named(
    changes: dict[str, str], what: str | None, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"a": Answer(report()), "b": Answer(report(**changes), "something is missing")}
    monkeypatch.setattr(elsewhere, "ask", lambda *_: answers)
    found = elsewhere.findings_on(["a:3", "b"], "mpi", "ssh")
    assert not any(finding.remedy for finding in found["a"])
    wrong = [finding for finding in found["b"] if finding.remedy]
    assert [finding.what for finding in wrong] == ([] if what is None else [what])
    if remedy is not None:
        assert str(wrong[0].remedy).startswith(remedy) and "on a" in wrong[0].state
    if what == "mpi4py":
        others = elsewhere.findings_on(["a", "b"], "ranks", "ssh")
        assert not any(finding.remedy for finding in others["b"])


@pytest.mark.parametrize("answer", [Answer("", "No module named 'tvm_axe'"), Answer("{}"), Answer("{broken")])
def test_a_host_without_the_package(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "ask", lambda *_: {"a": answer})
    (finding,) = elsewhere.findings_on(["a"], "mpi", "ssh")["a"]
    assert finding.state == (answer.fault or "tvm-axe doctor says nothing there")
    assert str(finding.remedy).startswith("pip install tvm-axe==")


# ---- Two hosts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.random(TOKENS, INNER, OUTER, seed=0)


@pytest.mark.parametrize(("engine", "names"), [("mpi", "a,b"), ("mpi", "{a},{b}:3"), ("ranks", "b,a")])
def test_the_demo_on_two_hosts(hosts: TwoHosts, engine: str, names: str, problem: Problem, tmp_path: Path) -> None:
    """Started on a, by names or by addresses, with rank 0 on either."""
    if engine == "mpi":
        pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install tvm-axe[mpi]")
    np.savez(tmp_path / "in.npz", **problem._asdict())
    kernel = [f"{HERE.parents[1] / 'tvm_axe/demo/block.py'}:block", "--schedule", f"{DEMO}:hierarchical"]
    options = ["--inputs", "in.npz", "--output", "out.npz", "--work-dir", str(tmp_path)]
    where = ["--engine", engine, "--hosts", names.format(**ADDRESSES), "--launcher", hosts.launcher]
    done = hosts.run("a", "-m", "tvm_axe", "run", *kernel, *options, *where, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"on dp=2,tp=2 ({engine}, llvm): out: float32[512, 768] to out.npz" in done.stdout
    assert done.stdout.count("\n") == 1
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["out"], problem.reference(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("axes", "stages"), [("dp=2,tp=2", {"all-reduce": "dp", "all-gather": "tp"}), ("tp=4", {"all-reduce": "tp"})]
)
def test_bytes_between_hosts(axes: str, stages: dict[str, str], hosts: TwoHosts, tmp_path: Path) -> None:
    """They are what two hosts exchange that sum a tensor as two devices do: each way, its size once."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install tvm-axe[mpi]")
    done = hosts.run("a", str(DEMO), axes, hosts.launcher, str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["hosts"], told["nodes"]) == ([[0, 1], [2, 3]], ["a", "a", "b", "b"])
    assert told["error"] < 1e-5
    assert told["stages"] == stages
    size = 4 * TOKENS * OUTER
    assert told["counted"] == 2 * (2 - 1) * size
    if axes == "dp=2,tp=2":  # what devices receive along dp comes from the other host
        assert told["derived"] == told["counted"]
    # The cable has headers and acknowledgements besides, and little else.
    assert 0.95 < told["wire"] / told["counted"] < 1.25


def test_errors_come_through(hosts: TwoHosts, tmp_path: Path) -> None:
    kernel = [f"{HERE / 'in_job.py'}:product", "--mesh", "tp=2", "--output", "out.npz", "--inputs", "none.npz"]
    for engine in ("mpi", "ranks"):
        command = ["-m", "tvm_axe", "run", *kernel, "--engine", engine, "--launcher", hosts.launcher]
        done = hosts.run("a", *command, "--hosts", "a,b", folder=tmp_path)
        assert done.returncode == 2 and "tvm-axe: error: none.npz: no such file" in done.stderr, done.stderr
        done = hosts.run("a", *command, "--hosts", "a,c", folder=tmp_path)
        assert done.returncode == 2 and "c: not reached by" in done.stderr and "Traceback" not in done.stderr


def test_the_doctor_on_two_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    command = ["-m", "tvm_axe", "doctor", "--launcher", hosts.launcher, "--engine", "ranks"]
    done = hosts.run("a", *command, "--hosts", "a,b", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a: ready\n" in done.stdout and "b: ready\n" in done.stdout
    back = "way back  a takes connections"
    assert re.findall(r"way .*", done.stdout) == [back, "way to b  it answers", back, "way to a  it answers"]
    done = hosts.run("a", *command, "--hosts", "b,c", "--json", folder=tmp_path)
    found = json.loads(done.stdout)["hosts"]
    assert done.returncode == 1 and list(found) == ["b", "c"] and done.stderr == ""
    assert "Could not resolve hostname c" in found["c"][0]["state"] and found["c"][0]["remedy"]
    there, away = found["b"][-2:]
    assert there == {"what": "way back", "state": f"{ADDRESSES['a']} takes connections", "remedy": None}
    assert away["what"] == "way to c" and away["state"].startswith("c: ") and "a firewall that lets" in away["remedy"]

"""Engines: what is registered, and what a new one takes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tvm
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.cli import main
from tvm_axe.collective import launch, registry
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

NEW = """
from tvm_axe.collective.engine import Engine
from tvm_axe.collective.local import LocalSession
from tvm_axe.errors import InputError

class Few(Engine):
    name = "few"

    def check(self, mesh):
        super().check(mesh)
        if mesh.size > 2:
            raise InputError(f"launch: engine 'few' has at most 2 devices; mesh {mesh} has {mesh.size}")

    def launch(self, mesh, timeout, **options):
        self.options(options)
        session = LocalSession(mesh, timeout, alone=False)
        session.start()
        return session

FEW = Few()
"""


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine: a module, and its registration."""
    (tmp_path / "engine_few.py").write_text(NEW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_HOMES", dict(registry._HOMES))
    registry.register("few", "engine_few:FEW")


def test_a_new_engine_is_a_module_and_a_line(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    with launch(Mesh({"tp": 2}), engine="few") as workers:
        x = workers.mesh_tensor((2,), "float32")
        x.slab(0)[:] = 3
        workers.all_reduce(x, x, "tp")
        assert x.slab(1).tolist() == [3, 3] and workers.engine == "few"
    with pytest.raises(InputError, match="engine 'few' has at most 2 devices; mesh tp=3 has 3"):
        launch(Mesh({"tp": 3}), engine="few")
    with pytest.raises(InputError, match="unknown engine 'many'; valid: processes, threads, mpi, ranks, cuda, few"):
        launch(Mesh({"tp": 3}), engine="many")
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "processes, threads, mpi, ranks, cuda, few" in " ".join(capsys.readouterr().out.split())


def test_a_name_is_one_engine(few: None) -> None:
    registry.register("few", "engine_few:FEW")
    with pytest.raises(InputError, match="engine 'few' is engine_few:FEW already, and can't be other:FEW"):
        registry.register("few", "other:FEW")


@pytest.mark.parametrize("name", registry.names())
def test_engines_know_their_names_and_devices(name: str) -> None:
    engine = registry.find(name)
    on_gpu = name == "cuda"
    assert engine.name == name and engine.device_type == ("cuda" if on_gpu else "cpu")
    assert engine.has_ranks == (name in ("mpi", "ranks"))
    assert engine.matches(Target("llvm")) != on_gpu
    assert engine.matches(Target({"kind": "cuda", "arch": "sm_90a"})) == on_gpu


@pytest.mark.parametrize("name", ["processes", "threads"])
def test_an_option_that_an_engine_lacks_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"launch: engine {name!r} has no option 'gpus'; it has none"):
        launch(Mesh({"tp": 2}), engine=name, gpus=(0, 0))


def test_a_target_of_another_kind_is_refused() -> None:
    message = r"load: engine 'threads' has devices of type cpu; target .*cuda.* is for others"
    with launch(Mesh({"tp": 1}), engine="threads") as workers, pytest.raises(InputError, match=message):
        workers.load(IRModule({}), Target({"kind": "cuda", "arch": "sm_90a"}))


def test_names_are_known_without_the_compiler() -> None:
    code = """
        import argparse, sys
        from tvm_axe.collective import registry
        from tvm_axe.cli.entry import COMMANDS
        commands = argparse.ArgumentParser().add_subparsers()
        for command in COMMANDS:
            command.add_to(commands)
        print(*registry.names(), "tvm" in sys.modules)
    """
    shown = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert shown.stdout == "processes threads mpi ranks cuda False\n"


def test_without_a_gpu_the_engine_says_what_is_missing() -> None:
    if tvm.cuda(0).exist:
        pytest.skip("there is a CUDA GPU on this machine")
    with pytest.raises(InputError, match=r'engine "cuda" (needs cuda-bindings|finds no CUDA driver|can\'t start)'):
        launch(Mesh({"tp": 2}), engine="cuda")
    with pytest.raises(InputError, match="engine 'cuda' has no option 'cores'; valid: gpus, processes, barriers"):
        launch(Mesh({"tp": 2}), engine="cuda", cores=3)

"""The package as a whole: its pins, its metadata, and the scripts that set it up."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tvm_axe
from tvm_axe import _versions, errors

ROOT = Path(__file__).parent.parent
RIGHT = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


# ---- versions ----------------------------------------------------------------------------------------------------


def test_installed_versions_are_admitted():
    _versions.check_versions()


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("apache-tvm", "0.27.0"),
        ("apache-tvm", "0.27.0.post2"),
        ("apache-tvm", "0.28.0"),
        ("apache-tvm-ffi", "0.1.13"),
        ("apache-tvm-ffi", "0.1.14"),
        ("apache-tvm-ffi", "0.1.15"),
        ("apache-tvm-ffi", "0.1.15.post1"),
        ("apache-tvm-ffi", "0.1.140.post1"),
    ],
)
def test_wrong_version_is_refused_with_the_pins(name, version):
    with pytest.raises(ImportError) as caught:
        _versions.check_versions({**RIGHT, name: version}.__getitem__)
    message = str(caught.value)
    assert f"{name} {version} is installed" in message
    assert "'apache-tvm==0.27.0.post1' 'apache-tvm-ffi>=0.1.14.post0,<0.1.15'" in message


def test_missing_compiler_is_refused_with_the_pins():
    def installed(name):
        raise metadata.PackageNotFoundError(name)

    with pytest.raises(ImportError, match=r"apache-tvm is not installed.*apache-tvm-ffi is not installed.*pip install"):
        _versions.check_versions(installed)


@given(st.sampled_from(list(RIGHT)), st.integers(0, 30), st.integers(0, 20), st.none() | st.integers(0, 3))
def test_check_agrees_with_the_pin(name, minor, patch, post):
    specifiers = pytest.importorskip("packaging.specifiers")
    head = "0" if name == "apache-tvm" else "0.1"
    version = f"{head}.{minor}.{patch}" if name == "apache-tvm" else f"{head}.{patch}"
    version += "" if post is None else f".post{post}"
    pin = next(pin for pinned, pin, _ in _versions.PINS if pinned == name)
    try:
        _versions.check_versions({**RIGHT, name: version}.__getitem__)
        admitted = True
    except ImportError:
        admitted = False
    assert admitted == specifiers.SpecifierSet(pin).contains(version)


def test_import_refuses_a_wrong_version_before_the_compiler_is_imported():
    code = (
        "import importlib.metadata, sys\n"
        "importlib.metadata.version = lambda name: '0.28.0'\n"
        "try:\n"
        "    import tvm_axe\n"
        "except ImportError as error:\n"
        "    print(error, 'tvm' in sys.modules)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "apache-tvm 0.28.0 is installed" in shown
    assert shown.rstrip().endswith("False")


# ---- metadata ----------------------------------------------------------------------------------------------------


def test_pins_are_those_of_the_metadata():
    needed = setup_cfg()["options"]["install_requires"].split()
    for name, pin, _ in _versions.PINS:
        assert f"{name}{pin}" in needed


def test_metadata():
    config = setup_cfg()
    assert config["metadata"]["name"] == "tvm-axe"
    assert config["metadata"]["version"] == tvm_axe.__version__ == metadata.version("tvm-axe")
    assert set(config["options.extras_require"]) == {"test", "fleet", "mpi", "stream", "cuda", "models", "docs", "dev"}
    (command,) = metadata.entry_points(group="console_scripts", name="tvm-axe")
    assert command.value == "tvm_axe.cli:main"
    assert (Path(tvm_axe.__file__).parent / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"## {tvm_axe.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture
def copied(tmp_path):
    """What a package is made of, in a repository of its own."""
    root = tmp_path / "copy"
    for part in ["tvm_axe", "tuning_logs"]:
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__", "local"))
    for part in ["setup.py", "setup.cfg", "pyproject.toml", ".gitignore", "README.md", "LICENSE"]:
        shutil.copy(ROOT / part, root)
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "t"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def shipped_of(path, folder):
    """What a process that imports the package from `path` takes for the records that ship."""
    code = "from tvm_axe.records.shipped import SHIPPED; print(SHIPPED, len([*SHIPPED.glob('*/*/*.json')]))"
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder, env=environment
    )
    return done.stdout.split()


def test_records_and_types_come_with_the_package(copied, tmp_path):
    """What is installed, and found there; in a checkout the records are found as they lie."""
    pytest.importorskip("setuptools", reason="builds the package as pip does")
    count = str(len([*copied.glob("tuning_logs/*/*/*.json")]))
    assert shipped_of(copied, tmp_path) == [str(copied / "tuning_logs"), count] and count != "0"
    installed = tmp_path / "installed"
    build = ["setup.py", "-q", "build", "--build-base", tmp_path / "build", "--build-lib", installed]
    subprocess.run([sys.executable, *build], cwd=copied, check=True, capture_output=True)
    assert (installed / "tvm_axe/py.typed").exists()
    sources = {path.relative_to(copied) for path in copied.glob("tvm_axe/**/*.py")}
    assert {path.relative_to(installed) for path in installed.glob("**/*.py")} == sources
    assert shipped_of(installed, tmp_path) == [str(installed / "tvm_axe/tuning_logs"), count]


def test_a_job_in_a_checkout_leaves_it_clean(copied):
    (copied / "dist").mkdir()  # which git ignores
    (copied / "dist/kernel.py").write_text(
        "from tvm.script import tirx as T\n\n"
        "@T.prim_func(s_tir=True)\n"
        "def double(a: T.Buffer((64,), 'float32'), b: T.Buffer((64,), 'float32')):\n"
        "    for i in range(64):\n"
        "        with T.sblock('b'):\n"
        "            vi = T.axis.spatial(64, i)\n"
        "            b[vi] = a[vi] * T.float32(2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(copied)}
    for command in (["tune", "--trials", "2"], ["show"]):
        done = subprocess.run(
            [sys.executable, "-m", "tvm_axe", command[0], "dist/kernel.py:double", *command[1:]],
            capture_output=True,
            text=True,
            cwd=copied,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert [*copied.glob("tuning_logs/local/*/*/database_tuning_record.json")]
    status = subprocess.run(["git", "status", "--porcelain"], cwd=copied, capture_output=True, text=True, check=True)
    assert status.stdout == ""


def test_errors_have_one_base_and_a_usual_one():
    for name in set(errors.__all__) - {"AxeError"}:
        error = getattr(errors, name)
        if name.endswith("Warning"):
            assert issubclass(error, UserWarning) and not issubclass(error, errors.AxeError)
            continue
        assert issubclass(error, errors.AxeError)
        assert issubclass(error, ValueError | RuntimeError)


# ---- scripts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """The scripts in a tree of their own, whose .venv has a stand-in for Python that writes down its arguments."""
    root = tmp_path / "a checkout"
    for part in ["scripts", ".ci"]:
        shutil.copytree(ROOT / part, root / part)
    for part in ["setup.cfg", "pyproject.toml"]:
        shutil.copy(ROOT / part, root)
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >>"$LOG"\necho "output of $2"\n')
    linter = python.with_name("lint-imports")
    linter.write_text('#!/bin/sh\necho "lint-imports $@" >>"$LOG"\n')
    for program in (python, linter):
        program.chmod(0o755)
    return root


def run_script(root, script, *arguments, python="python3"):
    """Run a script from a folder that isn't the checkout; gives the process and what it asked of Python."""
    log = root.parent / "log"
    log.write_text("")
    done = subprocess.run(
        ["bash", str(root / script), *arguments],
        capture_output=True,
        text=True,
        cwd=root.parent,
        env={**os.environ, "LOG": str(log), "PYTHON": python},
        check=False,
    )
    return done, log.read_text().splitlines()


def test_demo_script_installs_once_and_prints_only_the_demos_output(checkout):
    done, calls = run_script(checkout, "scripts/demo.sh", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "output of tvm_axe\n"
    assert [call for call in calls if "install" in call] == [
        "-m pip install --quiet --disable-pip-version-check --editable ."
    ]
    assert calls[-1] == "-m tvm_axe demo --json"
    done, calls = run_script(checkout, "scripts/demo.sh", "--json")
    assert calls == ["-m tvm_axe demo --json"]
    assert done.stderr == ""


def test_test_script_installs_its_extra_and_passes_arguments_on(checkout):
    for script in ["scripts/test.sh", ".ci/run"]:
        _, calls = run_script(checkout, script, "-k", "name")
        checks = ["-m ruff check .", "-m ruff format --check .", "-m mypy", "lint-imports --no-cache"]
        assert calls[-5:] == [*checks, "-m pytest -rs -n auto -k name"]
        assert any("--editable .[test]" in call for call in calls) == (script == "scripts/test.sh")
    _, calls = run_script(checkout, "scripts/demo.sh")
    assert calls == ["-m tvm_axe demo"], "the test extra brings the package itself"


@pytest.mark.parametrize("changed", ["setup.cfg", "pyproject.toml"])
def test_scripts_install_again_after_a_change(checkout, changed):
    run_script(checkout, "scripts/demo.sh")
    with open(checkout / changed, "a") as file:
        file.write("# changed\n")
    _, calls = run_script(checkout, "scripts/demo.sh")
    assert any("pip install" in call for call in calls)
    moved = checkout.rename(checkout.parent / "moved")
    _, calls = run_script(moved, "scripts/demo.sh")
    assert any("pip install" in call for call in calls)


def test_scripts_say_what_is_missing_when_there_is_no_python(checkout):
    shutil.rmtree(checkout / ".venv")
    done, calls = run_script(checkout, "scripts/demo.sh", python="no-such-python")
    assert done.returncode != 0
    assert "no Python >= 3.10 with the venv module (tried no-such-python)" in done.stderr
    assert calls == [] and done.stdout == ""


# ---- README ------------------------------------------------------------------------------------------------------


def test_the_tour_in_the_readme_runs(tmp_path):
    tour = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "tour.py").write_text("\n".join(tour))
    done = subprocess.run(
        [sys.executable, "tour.py"], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "mesh kernel over tp" in done.stdout
    (sample, *_) = re.findall(r"```text\n(schedule .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    printed = done.stdout.splitlines()
    assert all(any(each.startswith(line) for each in printed) for line in sample.splitlines())
    assert "MM-fuse(RS-C-AG)" in done.stdout.partition("model ms")[2]


def test_links_between_the_documents_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"

"""What a wheel holds and asks for. Nothing is compiled: scripts/test.sh installs a real one."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

tomllib = pytest.importorskip("tomllib", reason="a part of Python since 3.11")

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "swarm_kv"
DISTRIBUTIONS = {"faiss": "faiss-cpu"}
"""Where pip's name is another one than Python's."""
PEERS = ROOT / "benchmarks" / "peers" / "runners"
"""Run in environments of their own, see scripts/setup.sh."""

PROBE = """
import json, sys
import setuptools
from distutils.core import run_setup

distribution = run_setup("setup.py", stop_after="config")
wheel = distribution.get_command_obj("bdist_wheel")
wheel.ensure_finalized()
modules = distribution.get_command_obj("build_py")
modules.build_lib = sys.argv[1]
modules.ensure_finalized()
modules.run()
print(json.dumps({"tag": wheel.get_tag(), "libraries": [e.name for e in distribution.ext_modules]}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`tag`, `libraries` and `files` of the wheel that setup.py would make."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, folder],
        cwd=ROOT,
        env={**os.environ, "SWARM_KV_CUDA": "0"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    return {**json.loads(done.stdout.splitlines()[-1]), "files": files}


def test_one_wheel_serves_every_python(wheel: dict[str, Any]) -> None:
    python, abi, platform = wheel["tag"]
    assert (python, abi) == ("py3", "none")
    assert platform.startswith("linux_")
    assert wheel["libraries"] == ["swarm_kv._C"]


def test_it_holds_the_package_and_nothing_else(wheel: dict[str, Any]) -> None:
    built = (".so", ".pyc")
    present = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in built
    }
    assert wheel["files"] == present
    assert "swarm_kv/py.typed" in present
    assert "swarm_kv/baselines/quest.py" in present


def declared() -> dict[str, set[str]]:
    """Names of distributions by extra; those that everybody gets under ""."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}

    def names(extra: str) -> set[str]:
        found: set[str] = set()
        for requirement in lists[extra]:
            own = re.fullmatch(r"swarm-kv\[(.+)\]", requirement)
            if own is None:
                found.add(re.match(r"[\w.-]+", requirement)[0])  # type: ignore[index]
            else:
                found.update(*(names(other) for other in own[1].split(",")))
        return found

    return {extra: names(extra) for extra in lists}


def imported(files: Iterable[pathlib.Path]) -> dict[str, pathlib.Path]:
    """Distributions that files import, wherever in them, each with a file that does."""
    found: dict[str, pathlib.Path] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in modules:
                top = module.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in ("swarm_kv", "benchmarks"):
                    found.setdefault(DISTRIBUTIONS.get(top, top), path)
    return found


def test_what_is_imported_is_declared() -> None:
    extras = declared()
    package = imported(PACKAGE.rglob("*.py"))
    benchmarks = imported(
        path for path in (ROOT / "benchmarks").rglob("*.py") if PEERS not in path.parents
    )
    assert {"torch", "faiss-cpu", "typer"} <= set(package)  # or nothing was looked at
    assert not set(package) - set().union(*extras.values()), package
    assert not set(benchmarks) - extras[""] - extras["bench"], benchmarks
    assert {"cli", "plot", "demo", "bench"} <= set(extras)


WITHOUT_EXTRAS = """
import importlib, sys

for name in ("typer", "rich", "matplotlib", "gguf", "accelerate"):
    sys.modules[name] = None  # so that importing it fails
for name in sys.argv[1:]:
    importlib.import_module(name)
try:
    import swarm_kv.cli
except SystemExit as error:
    print(error)
"""


def test_only_the_command_needs_an_extra() -> None:
    names = [path.relative_to(ROOT).with_suffix("").parts for path in PACKAGE.rglob("*.py")]
    others = {".".join(parts).removesuffix(".__init__") for parts in names if parts[1] != "cli"}
    assert len(others) > 30
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *sorted(others)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'swarm-kv[" in done.stdout


def test_the_command_is_installed_under_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"swarm-kv": "swarm_kv.cli:app"}
    assert project["requires-python"] == ">=3.10"

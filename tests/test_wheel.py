"""The wheel as a user meets it: built, installed into an environment of its own, used from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the wheel is built where the dev extra is installed")

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["qwenjax", "qwenjax_ffi", "qwenjax_kernels", "qwenjax_serving"]
# What a plain install does not have; an import of one raises as it would there.
ABSENT = [
    "torch",
    "transformers",
    "cutlass",
    "cuda",
    "pytest",
    "safetensors",
    "uvicorn",
    "starlette",
    "msgspec",
    "prometheus_client",
]


@dataclass(frozen=True)
class Installed:
    wheel: Path
    python: Path
    empty: Path

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command from the empty folder, with nothing of the caller's Python or JAX settings but the CPU."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_", "JAX_"))}
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.empty,
            env=kept | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=120,
        )


def require(command: list[str | Path]) -> None:
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    require([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder])
    [wheel] = folder.glob("*.whl")

    environment = folder / "venv"
    venv.create(environment, symlinks=True)  # without pip: the caller's installs into it, ten times as fast
    python = environment / "bin" / "python"
    require([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel])

    # The dependencies are read where they are. A path in a .pth file is not itself searched for .pth files, so that
    # the caller's editable install of qwenjax stays out of sight.
    [site] = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    empty = folder / "empty"
    empty.mkdir()
    return Installed(wheel, python, empty)


def test_the_wheel_holds_the_four_packages_and_nothing_else(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_every_module_of_the_tree_is_in_the_wheel(installed: Installed) -> None:
    folders = [ROOT, ROOT / "ffi", ROOT / "kernels", ROOT / "serving"]
    tree = {
        str(path.relative_to(folder))
        for folder, package in zip(folders, PACKAGES, strict=True)
        for path in (folder / package).rglob("*.py")
    }
    wheel = set(zipfile.ZipFile(installed.wheel).namelist())
    assert tree
    assert tree <= wheel, f"missing from the wheel: {sorted(tree - wheel)}"


def test_packages_import_from_an_empty_folder_without_the_extras(installed: Installed) -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))
import importlib, pathlib
for name in {PACKAGES}:
    print(pathlib.Path(importlib.import_module(name).__file__).parent.parent)
"""
    done = installed.run(installed.python, "-c", code)
    assert done.returncode == 0, done.stderr
    [site] = installed.python.parent.parent.glob("lib/python*/site-packages")
    assert set(done.stdout.split()) == {str(site)}


def test_the_command_line_answers_from_an_empty_folder(installed: Installed) -> None:
    done = installed.run(installed.python.with_name("qwenjax"), "--help")
    assert done.returncode == 0, done.stderr
    assert "qwenjax" in done.stdout
    assert not list(installed.empty.iterdir())


def test_configs_are_reachable_from_the_installed_package(installed: Installed) -> None:
    tree = sorted(str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*.json"))
    code = """
from importlib.resources import files
folder = files("qwenjax") / "configs"
print(*sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json")), sep="\\n")
"""
    done = installed.run(installed.python, "-c", code)
    assert done.returncode == 0, done.stderr
    assert tree
    assert done.stdout.split() == tree

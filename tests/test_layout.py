"""The house's rules: imports go down only, the oracle stays out of the packages, all code is ours."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Package: its folder, and the packages of ours that it may import.
HOUSE = {
    "qwenjax_kernels": ("kernels/qwenjax_kernels", set()),
    "qwenjax_ffi": ("ffi/qwenjax_ffi", {"qwenjax_kernels"}),
    "qwenjax": ("qwenjax", {"qwenjax_ffi"}),
    "qwenjax_serving": ("serving/qwenjax_serving", {"qwenjax", "qwenjax_ffi", "qwenjax_kernels"}),
}
ROOMS = ["kernels", "ffi", "qwenjax", "serving", "configs", "bench", "tests", "docs"]
# The oracle of the parity tests and what comes with it: test dependencies only.
ORACLE = {"torch", "torchvision", "transformers", "accelerate"}
SELF = Path(__file__).name


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of each import in `source`, at any depth and also by name at run time."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield node.lineno, importlib.util.resolve_name(name, package) if node.level else name
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            target = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(target, ast.Constant):
                yield node.lineno, str(target.value)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of one module that the house forbids, as "line: name"."""
    package = module.partition(".")[0]
    forbidden = (set(HOUSE) - HOUSE[package][1] - {package}) | ORACLE | {"tests", "bench"}
    if package == "qwenjax_kernels":
        forbidden |= {"jax", "jaxlib", "flax"}
    found = imported_modules(source, module, is_package)
    return [f"{line}: {name}" for line, name in found if name.partition(".")[0] in forbidden]


def modules() -> list[tuple[str, Path]]:
    """(module name, file) of every module in the four packages."""
    found = []
    for package, (folder, _) in HOUSE.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (package, *path.relative_to(ROOT / folder).with_suffix("").parts)
            found.append((".".join(parts[:-1] if path.name == "__init__.py" else parts), path))
    return found


def tracked_source() -> list[Path]:
    """Every source file of ours: what is in the rooms and at the top, without environments and caches."""
    suffixes = {".py", ".pyi", ".sh", ".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".js", ".ts", ".proto"}
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in suffixes]
    return [path for path in found if "__pycache__" not in path.parts]


def test_imports_go_down_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{violation}"
        for module, path in modules()
        for violation in violations(path.read_text(), module, path.name == "__init__.py")
    ]
    assert not wrong, "imports that the house forbids (CONTRIBUTING.md, Layout):\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", HOUSE)
def test_every_package_is_a_regular_one(package: str) -> None:
    # Without an __init__.py it would be a namespace, and any folder of that name on sys.path would join it.
    assert package in dict(modules()), f"{HOUSE[package][0]}/__init__.py is missing"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("qwenjax_kernels.gemm", "import qwenjax_ffi"),
        ("qwenjax_kernels.gemm", "def f():\n    import jax.numpy as jnp"),
        ("qwenjax_ffi.gemm", "from qwenjax.config import ModelConfig"),
        ("qwenjax.models.qwen3_moe", "from qwenjax_kernels import gemm"),
        ("qwenjax.models.qwen3_moe", "if TYPE_CHECKING:\n    import qwenjax_serving.cli"),
        ("qwenjax.config", "import numpy, torch.nn"),
        ("qwenjax.config", "try:\n    importlib.import_module('transformers')\nexcept ImportError:\n    pass"),
        ("qwenjax_serving.cli", "from tests.helpers import tiny"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("qwenjax_ffi.gemm", "from qwenjax_kernels import gemm"),
        ("qwenjax.models.qwen3_moe", "from ..config import ModelConfig"),
        ("qwenjax.models.qwen3_moe", "import qwenjax.config\nimport jax"),
        ("qwenjax_serving.cli", "import qwenjax, qwenjax_ffi, qwenjax_kernels"),
    ],
)
def test_an_allowed_import_is_not_found(module: str, source: str) -> None:
    assert violations(source, module) == []


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_says_what_it_is(room: str) -> None:
    lines = (ROOT / room / "README.md").read_text().splitlines()
    assert lines[0] == f"# {room}/"
    assert len(lines) > 2


def test_no_vendored_code() -> None:
    folders = {"vendor", "vendored", "_vendor", "third_party", "thirdparty", "external", "extern"}
    foreign = re.compile(r"^\W*(copyright\b|spdx-filecopyrighttext|\(c\) \d{4})", re.IGNORECASE | re.MULTILINE)
    wrong = [
        str(path.relative_to(ROOT))
        for path in tracked_source()
        if folders & set(path.relative_to(ROOT).parts) or foreign.search(path.read_text())
    ]
    assert not wrong, f"code from elsewhere: {wrong}"


def test_no_generated_code() -> None:
    names = re.compile(r"(_pb2(_grpc)?\.pyi?|\.min\.js|\.bundle\.js)$")
    marks = re.compile(r"@generated|do not edit|auto-?generated|generated by", re.IGNORECASE)
    wrong = []
    for path in tracked_source():
        text = path.read_text()
        head = "\n".join(text.splitlines()[:10])
        endless = max(map(len, text.splitlines()), default=0) > 500
        if path.name != SELF and (names.search(path.name) or marks.search(head) or endless):
            wrong.append(str(path.relative_to(ROOT)))
    assert not wrong, f"generated code: {wrong}"

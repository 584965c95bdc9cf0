"""The imports obey docs/architecture.md, and both packages work without triton."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
MAX_LINES = 300


class Room(NamedTuple):
    floor: int
    others: frozenset[str]


def _room(floor: int, *others: str) -> Room:
    return Room(floor, frozenset(others))


# The same table as docs/architecture.md, which a test compares with this one.
ROOMS = {
    "ragged.errors": _room(0),
    "ragged.rules": _room(1, "attrs", "numpy", "torch"),
    "ragged.integers": _room(1, "numpy"),
    "ragged.convert": _room(2, "attrs", "numpy", "torch"),
    "ragged.derived": _room(2, "torch"),
    "ragged.interop": _room(2, "torch"),
    "ragged.join": _room(3, "numpy", "torch"),
    "ragged.tokens": _room(3, "attrs", "numpy"),
    "ragged.sequences": _room(3, "numpy", "torch"),
    "ragged.bounds": _room(3, "attrs"),
    "ragged.csr": _room(3, "numpy"),
    "ragged.header": _room(3, "numpy"),
    "ragged.tiles": _room(3, "numpy"),
    "ragged.options": _room(4, "torch"),
    "ragged.layout": _room(4, "attrs", "numpy"),
    "ragged.rearrange": _room(5, "numpy"),
    "ragged.packing": _room(5, "torch"),
    "ragged.staging": _room(6, "attrs", "numpy", "torch"),
    "ragged.regroup": _room(7, "attrs", "numpy", "torch"),
    "ragged.assembly": _room(8, "attrs", "numpy", "torch"),
    "ragged.batch": _room(9, "attrs", "torch"),
    "ragged.builder": _room(10),
    "ragged.attention": _room(10, "attrs", "numpy", "torch"),
    "ragged.distributed": _room(10, "numpy", "torch"),
    "kv_canary.kinds": _room(0),
    "kv_canary.kernels": _room(0, "triton"),
    "kv_canary.ring": _room(0, "torch"),
    "kv_canary.reference": _room(1, "ragged", "torch"),
    "kv_canary.torch_backend": _room(1, "ragged", "torch"),
    "kv_canary.triton_backend": _room(1, "ragged", "torch"),
    "kv_canary.launching": _room(0, "ragged", "torch", "triton"),
    "kv_canary.backends": _room(1, "ragged", "torch"),
    "kv_canary.guards": _room(2, "ragged", "torch"),
    "kv_canary.snapshot": _room(1, "ragged", "torch"),
    "kv_canary.violations": _room(2, "attrs", "ragged", "torch"),
    "kv_canary.report": _room(2, "attrs", "ragged", "torch"),
    "kv_canary.scatter": _room(3, "ragged", "torch"),
    "kv_canary.changes": _room(2, "attrs", "numpy", "ragged", "torch"),
    "kv_canary.rows": _room(3, "attrs", "numpy", "ragged"),
    "kv_canary.verify": _room(4, "numpy", "ragged", "torch"),
    "kv_canary.pool": _room(5, "attrs", "numpy", "ragged", "torch"),
    "kv_canary.mixing": _room(0, "torch"),
    "kv_canary.findings": _room(2, "attrs", "ragged"),
    "kv_canary.stamping": _room(3, "attrs", "ragged", "torch"),
    "kv_canary.stamps_reference": _room(3, "ragged", "torch"),
    "kv_canary.stamps_torch": _room(3, "ragged", "torch"),
    "kv_canary.stamps_triton": _room(3, "ragged", "torch"),
    "kv_canary.intake": _room(3, "numpy", "ragged", "torch"),
    "kv_canary.vitals": _room(4, "numpy"),
    "kv_canary.canary": _room(6, "attrs", "numpy", "ragged", "torch"),
    "kv_canary.selftest": _room(6, "attrs", "ragged", "torch"),
    "kv_canary.warmup": _room(7, "ragged", "torch"),
    "kv_canary.replay": _room(6, "attrs", "matplotlib", "numpy", "ragged", "torch"),
    "kv_canary.ops": _room(6, "ragged", "torch"),
    "kv_canary.integrations": _room(4, "ragged"),
    "kv_canary.printing": _room(7, "click", "rich"),
    "kv_canary.cli": _room(7, "click", "rich", "torch"),
    "kv_canary.__main__": _room(7),
}


TRITON = ("kv_canary.triton_backend", "kv_canary.stamps_triton")
"""The rooms that import kernels, and that are loaded when they are first used."""


class Import(NamedTuple):
    """One imported module: its full dotted name, and whether the import runs with the file."""

    target: str
    at_import: bool


def _module_name(path: Path, top: Path) -> str:
    parts = path.relative_to(top).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room_of(module: str) -> str:
    """`kv_canary.kernels.scatter` lives in the room `kv_canary.kernels`."""
    return ".".join(module.split(".")[:2])


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Every import statement that can run; what only a type checker reads is left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_import
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield from _walk(ast.Module([other], []), at_import)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, at_import and not inside)


def imports_of(path: Path, top: Path, known: frozenset[str]) -> set[Import]:
    """What a file imports; `from package import module` counts as that module."""
    module = _module_name(path, top)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for statement, at_import in _walk(ast.parse(path.read_text()), True):
        if isinstance(statement, ast.Import):
            targets = [alias.name for alias in statement.names]
        else:
            assert isinstance(statement, ast.ImportFrom)
            base = statement.module or ""
            if statement.level:
                parent = package.split(".")[: len(package.split(".")) - statement.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in statement.names]
            targets = [name if name in known else base for name in names]
        found |= {Import(target, at_import) for target in targets}
    return found


def _graph(top: Path) -> dict[str, set[Import]]:
    files = {_module_name(path, top): path for path in sorted(top.rglob("*.py"))}
    known = frozenset(files)
    return {module: imports_of(path, top, known) for module, path in files.items()}


GRAPH = _graph(SRC)
MODULES = sorted(module for module in GRAPH if "." in module)  # all but the two public faces
STDLIB = sys.stdlib_module_names


def _own(module: str) -> bool:
    return module.split(".")[0] in ("ragged", "kv_canary")


def _edges(module: str) -> list[Import]:
    return sorted(GRAPH[module])


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_room(module: str) -> None:
    assert _room_of(module) in ROOMS, "add a row to docs/architecture.md and to ROOMS"


def test_every_room_has_a_module() -> None:
    assert set(ROOMS) - {_room_of(module) for module in MODULES} == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_its_own_floor_and_lower_ones(module: str) -> None:
    room, package = _room_of(module), module.split(".")[0]
    for target, _ in _edges(module):
        if not _own(target) or target.split(".")[0] != package or _room_of(target) == room:
            continue
        assert target != package, f"{module} imports its own public face, which is a circle"
        assert ROOMS[_room_of(target)].floor <= ROOMS[room].floor, f"{module} imports {target}"


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_no_package_that_its_row_does_not_allow(module: str) -> None:
    tops = {target.split(".")[0] for target, _ in _edges(module)}
    foreign = tops - STDLIB - {module.split(".")[0]}
    assert foreign <= ROOMS[_room_of(module)].others, f"{module}: see docs/architecture.md"


def test_ragged_never_imports_kv_canary_or_triton() -> None:
    for module in GRAPH:
        if module.split(".")[0] == "ragged":
            tops = {target.split(".")[0] for target, _ in GRAPH[module]}
            assert not tops & {"kv_canary", "triton"}, module


def test_kernels_import_only_kinds_and_each_other() -> None:
    for module in MODULES:
        if _room_of(module) == "kv_canary.kernels":
            own = {_room_of(target) for target, _ in GRAPH[module] if _own(target)}
            assert own <= {"kv_canary.kinds", "kv_canary.kernels"}, module


def test_only_the_triton_backend_imports_kernels() -> None:
    for module, imports in GRAPH.items():
        if _room_of(module) in ("kv_canary.kernels", *TRITON):
            continue
        assert not [t for t, _ in imports if t.startswith("kv_canary.kernels")], module


def test_nothing_imports_the_triton_backend_before_it_is_used() -> None:
    for module, imports in GRAPH.items():
        if _room_of(module) in TRITON:
            continue
        eager = [t for t, at_import in imports if at_import and t.startswith(TRITON)]
        assert not eager, f"{module} imports {eager} while it is imported itself"


def test_there_is_no_circle_of_imports() -> None:
    # Late imports inside functions count too: they hide a circle, they do not break it.
    state: dict[str, str] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        if state.get(module) == "done":
            return
        assert state.get(module) != "open", " -> ".join([*path, module])
        state[module] = "open"
        for target, _ in _edges(module):
            # A package's face, seen from inside the package, is judged by the floors test.
            if target in GRAPH and target != module.rpartition(".")[0]:
                visit(target, (*path, module))
        state[module] = "done"

    for module in sorted(GRAPH):
        visit(module, ())


@pytest.mark.parametrize("folder", ["src", "bench"])
def test_files_fit_on_a_few_screens(folder: str) -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_bench_and_src_never_import_tests() -> None:
    helpers = {path.stem for path in (ROOT / "tests").glob("*.py")}
    tests = {"tests", "pytest", "hypothesis"} | helpers
    for path in [*SRC.rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        tops = {t.split(".")[0] for t, _ in imports_of(path, ROOT, frozenset())}
        forbidden = tests | ({"bench"} if path.is_relative_to(SRC) else set())
        assert not tops & forbidden, path


def test_the_page_has_the_same_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    found = {}
    for package, table in re.findall(r"### `(\w+)`\n(.*?)(?=\n#|\nFloors)", page, re.S):
        for name, floor, others in re.findall(r"^\| `(\w+)` \| (\d+) \| (.*?) \|", table, re.M):
            names = [] if others == "nothing" else others.split(", ")
            found[f"{package}.{name}"] = _room(int(floor), *names)
    assert found == ROOMS


def _python(code: str) -> str:
    """Run code in a fresh process that sees only src; its output, or its traceback as a failure."""
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BUILD_AND_SCATTER = """
import torch
from kv_canary import GuardReport, scatter
from ragged import RaggedBatchBuilder
builder = RaggedBatchBuilder(device="cpu", pool_shape=(4, 8))
builder.extend([1, 3], [[7, 8, 9], [5]], prefix_lens=[2, 0])
pool = torch.full((4, 8), -7, dtype=torch.int32)
report = GuardReport.allocate("cpu")
scatter(builder.build(), pool, report=report)
report.raise_if_any()
assert pool[1].tolist() == [-7, -7, 7, 8, 9, -7, -7, -7], pool
assert pool[3].tolist() == [5] + [-7] * 7, pool
"""


def test_importing_and_using_both_packages_on_the_cpu_wakes_neither_triton_nor_cuda() -> None:
    out = _python(
        "import sys, torch\n"
        "assert 'triton' not in sys.modules, 'torch alone imports triton; this test says nothing'\n"
        "import ragged, kv_canary\n"
        "def awake():\n"
        "    return sorted(m for m in sys.modules if m.split('.')[0] == 'triton'"
        f" or m.startswith(('kv_canary.kernels', *{TRITON})))\n"
        "print(awake(), torch.cuda.is_initialized())\n"
        f"{BUILD_AND_SCATTER}\n"
        "print(awake(), torch.cuda.is_initialized())\n"
    )
    assert out.splitlines() == ["[] False", "[] False"]


def test_both_packages_work_where_triton_cannot_be_imported() -> None:
    _python(f"import sys; sys.modules['triton'] = None\n{BUILD_AND_SCATTER}")

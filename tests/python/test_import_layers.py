"""Tests of the import graph of lmdeploy: no cycle, no import of a higher layer, small folders."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "lmdeploy"
# From the lowest layer to the highest. Packages of one row import nothing from each other.
LAYERS = (
    ("_turbomind", "version"),
    ("base",),
    ("config",),
    ("models",),
    ("chat", "checkpoint"),
    ("response", "kv_store"),
    ("engine",),
    ("pipeline", "tokenizer"),
    ("lite",),
    ("replicas",),
    ("serve",),
    ("api",),
    ("__init__", "cli", "messages", "model"),  # the last two: import paths of LMDeploy's users
    ("__main__",),
    ("kvx",),  # components: the server, all of the above, needs none of them
    ("kv_cache", "kv_rows"),
)
MAX_MODULES = 12
REGISTRIES = {"models", "chat.formats", "serve.routes", "checkpoint.methods"}
LAYER = {name: level for level, row in enumerate(LAYERS) for name in row}


def modules(package: Path = PACKAGE) -> dict[str, str]:
    """Return the source of each module by its name in the package, stubs included."""
    paths = [*package.rglob("*.py"), *package.rglob("*.pyi")]
    names = {path: path.relative_to(package).with_suffix("").as_posix() for path in paths}
    return {name.replace("/", "."): path.read_text("utf-8") for path, name in names.items()}


def imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, also in functions and for type checkers."""

    def found(tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, "relative imports are not resolved here"
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    is_module = module_of(full) in sources or package_of(full) in sources
                    yield full if is_module else str(node.module)

    def module_of(name: str) -> str:
        return name.removeprefix("lmdeploy.")

    def package_of(name: str) -> str:
        return f"{name}.__init__".removeprefix("lmdeploy.")

    graph = {}
    for name, source in sources.items():
        ours = [m for m in found(ast.parse(source)) if m.split(".")[0] == "lmdeploy"]
        graph[name] = {module_of(m) if module_of(m) in sources else package_of(m) for m in ours}
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules in cycles and on paths between cycles; none if there is no cycle."""
    left = set(graph)
    while True:
        imported = {target for name in left for target in graph[name]}
        kept = {name for name in left & imported if graph[name] & left}
        if kept == left:
            return sorted(left)
        left = kept


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports that lead to a higher layer, or to another package of the same row."""

    def is_allowed(name: str, target: str) -> bool:
        own, other = name.split(".")[0], target.split(".")[0]
        return own == other or LAYER[own] > LAYER[other]

    return [f"{a} -> {b}" for a in graph for b in sorted(graph[a]) if not is_allowed(a, b)]


def crowded(sources: dict[str, str]) -> dict[str, int]:
    """Return the folders with more than MAX_MODULES modules."""
    names = [name for name in sources if not name.endswith("__init__")]
    sizes = Counter(name.rpartition(".")[0] for name in names)
    return {f: n for f, n in sizes.items() if n > MAX_MODULES and f not in REGISTRIES}


def test_import_graph_of_the_package_has_no_fault() -> None:
    graph = imports(modules())
    assert cycle(graph) == []
    assert upward(graph) == []
    assert crowded(modules()) == {}


@pytest.mark.parametrize(
    "text",
    [
        "from lmdeploy.serve.app import make_app",
        "import lmdeploy.serve.app",
        "def f():\n    from lmdeploy.serve import app",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lmdeploy.serve import app",
    ],
)
def test_import_graph_planted_import_is_found(text: str) -> None:
    # serve.app imports base.checks, so the planted import also makes a cycle.
    sources = modules()
    sources["base.checks"] += f"\n{text}\n"
    graph = imports(sources)
    assert "base.checks -> serve.app" in upward(graph)
    assert {"base.checks", "serve.app"} <= set(cycle(graph))


def test_upward_import_between_packages_of_one_row_is_found() -> None:
    graph = imports({**modules(), "chat.planted": "import lmdeploy.checkpoint.hub"})
    assert upward(graph) == ["chat.planted -> checkpoint.hub"]


def test_import_of_a_component_by_the_server_is_found() -> None:
    graph = imports({**modules(), "serve.planted": "import lmdeploy.kv_cache.cache"})
    assert upward(graph) == ["serve.planted -> kv_cache.cache"]


def test_crowded_folder_is_found() -> None:
    planted = {f"engine.planted{i}": "" for i in range(MAX_MODULES + 1)}
    assert crowded({**modules(), **planted}).keys() == {"engine"}
    assert crowded({**modules(), **{n.replace("engine", "models"): "" for n in planted}}) == {}

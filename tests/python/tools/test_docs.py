"""Compare the documentation with the code."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from reference.codecs import MODES
from reference.layout import row_bytes

from lmdeploy import _turbomind
from lmdeploy.checkpoint.methods import METHODS
from lmdeploy.serve.routes import ROUTERS

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("", "benchmarks/", "components/**/", "docs/**/", "tests/")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md"))
NAMES = ("reference/flags.md", "reference/fields.md", "reference/limits.md", "models.md")
# SmolLM2-135M. The README states its gain over a 16-bit cache.
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(text: str, title: str) -> list[list[str]]:
    """Return the rows of the first table after a heading, without its head."""
    body = text.split(f"\n## {title}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", body, re.M)
    assert lines is not None
    rows = [line.strip("|").split("|") for line in lines[0].splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load("scripts/dev/make_reference.py")


@pytest.mark.parametrize("name", NAMES)
def test_reference_page_equals_code(reference: ModuleType, name: str) -> None:
    assert set(reference.PAGES) == set(NAMES)
    assert read(f"docs/{name}") == reference.PAGES[name]()


def test_tables_equal_results() -> None:
    pytest.importorskip("matplotlib")
    charts = load("docs/make_charts.py")
    assert set(charts.TABLES) == {"performance.md", "accuracy.md", "gpu.md"}
    for name, tables in charts.TABLES.items():
        page = read(f"docs/{name}")
        assert charts.with_tables(page, tables) == page


def test_kv_format_table_equals_reference() -> None:
    rows = {quoted(row[0])[0]: row for row in table(read("docs/kv_cache.md"), "Formats")}
    assert set(rows) == set(MODES)
    for name, row in rows.items():
        assert [int(cell) for cell in row[-2:]] == [row_bytes(name, 128), row_bytes(name, 64)]
        if row[1].isdigit():
            assert _turbomind.get_kv_cache_mode(int(row[1])).name.endswith(name)


def test_readme_formats_equal_memory_plan() -> None:
    lengths = (256, 512, 2048, 8192)
    model = _turbomind.ModelConfig()
    model.num_layers, model.num_kv_heads, model.head_dim = LAYERS, KV_HEADS, HEAD_DIM
    model.windows = [0] * LAYERS
    for policy, bits, _, *gains in table(read("README.md"), "KV cache formats"):
        name = quoted(policy)[-1]
        assert float(bits) == round(bits_per_value(name), 2)
        assert len(gains) == len(lengths)
        for length, gain in zip(lengths, gains, strict=True):
            none, taken = (session_bytes(model, kind, length) for kind in ("none", name))
            assert gain == f"{none / taken:.2f}×"


def bits_per_value(name: str) -> float:
    """Return the bits of a value in a quantized block with the default preset of a format."""
    bits = row_bytes(name, HEAD_DIM) * 8 / HEAD_DIM
    if bits >= 8:
        return bits
    offsets = -(-KV_HEADS * (HEAD_DIM + 4) // 64) * 64
    return bits + offsets * 8 / (2 * 64 * KV_HEADS * HEAD_DIM)


def session_bytes(model: _turbomind.ModelConfig, name: str, length: int) -> int:
    """Return the bytes of a session with the default preset of a format."""
    config = _turbomind.EngineConfig()
    config.kv_layers = [(name, name)] * LAYERS
    config.session_len = length
    config.cache_block_seq_len = 64
    balanced = row_bytes(name, HEAD_DIM) * 8 / HEAD_DIM < 8
    config.kv_sink_tokens, config.kv_recent_tokens = (64, 64) if balanced else (0, -1)
    if balanced:
        config.kv_k_offset, config.kv_window_format = True, "int8"
    return _turbomind.sequence_bytes(model, config, length)


def test_endpoint_table_equals_routes() -> None:
    routes = {
        f"{method} {route.path.replace(':path', '')}"
        for router in ROUTERS
        for route in router.routes
        for method in route.methods - {"HEAD"}
    }
    documented = {
        name for row in table(read("docs/serving.md"), "Endpoints") for name in quoted(row[0])
    }
    assert documented == routes


def test_method_table_equals_registry() -> None:
    text = read("docs/weights.md")
    rows = re.search(r"^\| `quant_method` .*\n(?:^\|.*\n)+", text, re.M)
    assert rows is not None
    documented = [quoted(line)[0] for line in rows[0].splitlines()[2:]]
    assert documented == list(METHODS)


def test_feature_table_names_tests_that_exist() -> None:
    lines = re.findall(r"^\| ([A-Z]\d\d) \|.*\| (.+) \| (.+) \|$", read("tests/FEATURES.md"), re.M)
    counts = {"T": 72, "M": 22, "G": 32, "K": 69, "D": 63}
    rows = [f"{letter}{i:02}" for letter, count in counts.items() for i in range(1, count + 1)]
    assert [row for row, _, _ in lines] == rows
    for row, state, proof in lines:
        assert state in ("yes", "partly", "no", "left out"), row
        assert proof.endswith(".") == (state != "yes"), row
        if state in ("no", "left out"):
            continue
        path, name = quoted(proof)[:2]
        assert state == "partly" or proof == f"`{path}` `{name}`", row
        source = read(path if path.startswith("components/") else f"tests/{path}")
        assert f"def {name}(" in source or f'"{name}"' in source or f" {name}" in source, row


def links() -> Iterator[tuple[Path, str, str]]:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8")):
            if "://" not in target:
                yield page, target, anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_to_files_and_headings() -> None:
    found = list(links())
    assert found
    for page, target, anchor in found:
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


def test_paths_in_backquotes_exist() -> None:
    roots = ("src/", "lmdeploy/", "scripts/", "tests/", "benchmarks/", "docs/", "components/")
    examples = {"lmdeploy/models/nova.py", "lmdeploy/serve/routes/NAME.py"}
    for page in PAGES:
        for name in quoted(page.read_text("utf-8")):
            if name.startswith(roots) and re.fullmatch(r"[\w./]+", name) and name not in examples:
                assert (ROOT / name).exists(), f"{page.name} names {name}"

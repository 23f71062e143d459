"""The tables of the documentation against the code, the formats against the specification."""

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.routing import APIRoute
from reference.codecs import MODES
from reference.layout import row_bytes

from lmdeploy import _turbomind, response
from lmdeploy.checkpoint.convert import MAPPED_FORMATS, engine_format
from lmdeploy.checkpoint.files.tensor_file import AWQ, SUPPORTED_FORMATS, StoredTensor
from lmdeploy.cli.engine_flags import UNSUPPORTED_FLAGS
from lmdeploy.cli.main import make_parser
from lmdeploy.config import kv_formats
from lmdeploy.models import FAMILIES
from lmdeploy.serve import schema as protocol
from lmdeploy.serve.routes import ROUTERS
from lmdeploy.serve.routes.chat import ChatCompletionRequest
from lmdeploy.serve.routes.completions import CompletionRequest
from lmdeploy.serve.routes.encode import EncodeRequest
from lmdeploy.serve.routes.generate import GenerateRequest

ROOT = Path(__file__).resolve().parents[3]
SERVING = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
FORMATS = (ROOT / "docs/kv_cache.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next of the same level."""
    (body,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return str(body)


def table(text: str) -> list[list[str]]:
    """The cells of all table rows, without heads and rules."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    heads = {i - 1 for i, row in enumerate(cells) if set(row[0]) <= {"-"}}
    return [row for i, row in enumerate(cells) if i not in heads and i - 1 not in heads]


def quoted(text: str) -> set[str]:
    """Everything between backquotes."""
    return set(re.findall(r"`([^`]+)`", text))


def flags_of(*path: str) -> set[str]:
    """The documented long flags of a command."""
    parser: argparse.ArgumentParser = make_parser()
    for name in path:
        (subparsers,) = (
            a
            for a in parser._actions  # argparse has no public way to a subcommand
            if isinstance(a, argparse._SubParsersAction)
        )
        parser = subparsers.choices[name]
    names = {flag for action in parser._actions for flag in action.option_strings}
    return {n for n in names if n.startswith("--")} - set(UNSUPPORTED_FLAGS) - {"--help"}


def test_flags() -> None:
    documented = {row[0].strip("`") for row in table(section(SERVING, "Flags"))}
    assert documented == flags_of("serve", "api_server")
    assert flags_of("chat") <= documented
    assert flags_of("check_env") == {"--dump-file"} <= quoted(section(SERVING, "Flags"))


def test_a_flag_that_is_not_documented_is_found() -> None:
    documented = {row[0].strip("`") for row in table(section(SERVING, "Flags"))}
    assert documented - {"--dry-run"} != flags_of("serve", "api_server")


def test_flags_of_lite() -> None:
    common = {"--log-level"}
    options = table(section(FORMATS, "Quality"))
    ingredients = {flag for row in options for flag in quoted(row[1])}
    for command, title in (
        ("calibrate", "Calibration"),
        ("kv-search", "A format per side and per layer"),
        ("kv-report", "A report on every format"),
    ):
        rows = table(section(FORMATS, title))
        documented = {flag for row in rows for flag in quoted(row[0])}
        ingredients = {
            flag for row in table(section(FORMATS, "Quality")) for flag in quoted(row[1])
        }
        assert documented <= flags_of("lite", command)
        assert flags_of("lite", command) - common - documented <= ingredients


def test_quality_options() -> None:
    rows = [row for row in table(section(FORMATS, "Quality")) if row[0].startswith("`kv_")]
    fields = {field.name for field in dataclasses.fields(response.TurbomindEngineConfig)}
    assert {row[0].strip("`") for row in rows} == {
        name for name in fields if name.startswith("kv_")
    } - {"kv_quality", "kv_cache_format"}
    documented = {flag for row in rows for flag in quoted(row[1])}
    assert documented <= flags_of("serve", "api_server")
    qualities = {row[0].strip("`") for row in table(section(FORMATS, "Quality"))}
    assert set(kv_formats.KV_QUALITIES) <= qualities


def test_endpoints() -> None:
    found = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    routes = {f"{method} {route.path}" for route in found for method in route.methods}
    routes = {route.replace(":path}", "}") for route in routes}
    assert {row[0].strip("`") for row in table(section(SERVING, "Endpoints"))} == routes


@pytest.mark.parametrize(
    ("endpoint", "schema"),
    [
        ("/v1/chat/completions", ChatCompletionRequest),
        ("/v1/completions", CompletionRequest),
        ("/generate", GenerateRequest),
        ("/v1/encode", EncodeRequest),
    ],
)
def test_fields(endpoint: str, schema: type[protocol.ApiRequest]) -> None:
    rows = {row[0].strip("`"): quoted(row[1]) for row in table(section(SERVING, "Fields"))}
    assert rows[endpoint] == set(schema.model_fields)


def test_options() -> None:
    body = section(SERVING, "Options of `pipeline` and the engine")
    engine, generation = body.split("Those of `GenerationConfig`:")
    for text, config, place in [
        (engine, response.TurbomindEngineConfig, unsupported.ENGINE),
        (generation, response.GenerationConfig, unsupported.GENERATION),
    ]:
        names = {field.name for field in dataclasses.fields(config)}
        names -= set(unsupported.unsupported_fields(place))
        assert {n for n in quoted(text) if re.fullmatch(r"[a-z_]+", n)} == names


def test_models() -> None:
    documented = {
        row[0]: (quoted(row[1]), quoted(row[2])) for row in table(section(SERVING, "Models"))
    }
    assert documented == {
        family.name: (set(family.hf_architectures), set(family.gguf_architectures))
        for family in FAMILIES
    }


def test_weights() -> None:
    expected = {
        "themselves": lambda stored: stored.lower(),
        "Q4_1": lambda _: "q4_1",
        "Q8_0": lambda _: "q8_0",
        "BF16": lambda _: "bf16",
    }
    documented: set[str] = set()
    for stored, computed, *_ in table(section(SERVING, "Weights")):
        if computed == "itself":
            assert stored.removesuffix(", of experts") in MAPPED_FORMATS
            continue
        for name in stored.replace("other ", "").removesuffix(", 4 bits").split(", "):
            tensor = StoredTensor("x", name, (1, 256), np.zeros(0, np.uint8))
            assert engine_format(tensor, exact=False) == expected[computed](name)
            documented.add(name)
    assert documented == {*SUPPORTED_FORMATS, AWQ}


def test_format_table() -> None:
    rows = {row[0].strip("`"): row for row in table(section(FORMATS, "The list"))}
    for mode in MODES:
        assert [int(cell) for cell in rows[mode][-2:]] == [
            row_bytes(mode, 128),
            row_bytes(mode, 64),
        ]
    integers = {rows[mode][1]: mode for mode in MODES if rows[mode][1].isdigit()}
    for number, mode in integers.items():
        assert _turbomind.get_kv_cache_mode(int(number)) == mode
    assert _turbomind.get_kv_cache_mode(16) == "nvfp4"


def test_every_name_of_the_engine_is_documented() -> None:
    names = {name for name, _ in _turbomind.kv_cache_mode_names()}
    assert names <= quoted(FORMATS)
    assert set(kv_formats.QUANT_POLICY_NAMES.values()) <= names
    assert set(kv_formats.FORMAT_NAMES) <= quoted(FORMATS)


def test_device_table() -> None:
    rows = table(section(FORMATS, "The list"))
    for device, meaning in (row for row in rows if row[0].startswith("CUDA SM")):
        for sm in re.findall(r"\d+", device):
            assert _turbomind.get_kv_cache_mode(16, int(sm)) == meaning.strip("`")
    with pytest.raises(ValueError, match="75"):
        _turbomind.get_kv_cache_mode(16, 75)


def test_first_page_bytes_per_value() -> None:
    for row in table(section(README, "KV cache formats")):
        mode = re.findall(r"`(\w+)`", row[0])[0]
        mode = {"0": "none", "8": "int8", "4": "int4"}.get(mode, mode)
        for head_dim, i in ((128, 0), (64, 1)):
            wanted = row_bytes(mode, head_dim)
            value = re.findall(r"[\d.]+", row[2])[i]
            gain = re.findall(r"[\d.]+", row[3])[i]
            assert float(value) == pytest.approx(wanted / head_dim, abs=6e-4)
            assert float(gain) == pytest.approx(row_bytes("none", head_dim) / wanted, abs=6e-3)


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                yield page, target


def test_links_lead_to_files() -> None:
    found = list(links())
    assert found
    assert [(p.name, target) for p, target in found if not (p.parent / target).exists()] == []


def test_named_paths_exist() -> None:
    """Source paths that a page names in backquotes."""
    roots = ("src/", "lmdeploy/", "scripts/", "tests/", "benchmarks/")
    for page in PAGES:
        for name in quoted(page.read_text(encoding="utf-8")):
            if name.startswith(roots) and re.fullmatch(r"[\w./]+", name):
                assert (ROOT / name).exists(), f"{page.name}: {name}"

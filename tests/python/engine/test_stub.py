"""Tests of lmdeploy/_turbomind.pyi, which has to declare what the compiled module has."""

import ast
import enum
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmdeploy
from lmdeploy import _turbomind
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.config.option import options_of

STUB = (Path(lmdeploy.__file__).parent / "_turbomind.pyi").read_text()
# Fields that the stub need not list: `copy_to_core` sets those of a request and of the engine by
# name, and `EngineStats.__getattr__` declares the counters.
UNLISTED = {
    "Request": {name for name, o in options_of(GenerationConfig).items() if o.more.to_core},
    "EngineConfig": {n for n, o in options_of(TurbomindEngineConfig).items() if o.more.to_core},
    "EngineStats": {n for n, v in _turbomind.EngineStats().to_dict().items() if type(v) is int},
}


def names_in(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the public names that statements define, except type aliases."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) != "TypeAlias":
            yield ast.unparse(node.target)


def public(names: Iterator[str] | list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def differences(stub: str) -> list[str]:
    """Return what a stub lacks or has too much."""
    tree = ast.parse(stub)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def members(node: ast.ClassDef) -> set[str]:
        bases = (classes[base.id] for base in node.bases if getattr(base, "id", None) in classes)
        return public(names_in(node.body)).union(*map(members, bases))

    found = list(public(names_in(tree.body)) ^ public(dir(_turbomind)))
    for name in classes.keys() & set(dir(_turbomind)):
        real = getattr(_turbomind, name)
        if issubclass(real, Exception):
            continue
        has = set(real.__members__) if issubclass(real, enum.Enum) else public(dir(real))
        listed = members(classes[name])
        wrong = (listed - has) | (has - listed - UNLISTED.get(name, set()))
        found += [f"{name}.{member}" for member in wrong]
    return sorted(found)


def test_stub_declares_what_the_module_has() -> None:
    assert differences(STUB) == []
    assert {"num_running", "accepted_tokens"} < UNLISTED["EngineStats"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("    stop_tokens: int\n", "RequestOutput.stop_tokens"),
        ("    num_blocks: int\n", "MemoryPlan.num_blocks"),
        ("    gated: bool\n", "ModelConfig.gated"),
        ("    nvfp4 = ...\n", "KvFormat.nvfp4"),
        ("def available_cpu_isas() -> list[str]: ...\n", "available_cpu_isas"),
    ],
)
def test_a_forgotten_or_outdated_line_of_the_stub_is_found(line: str, name: str) -> None:
    assert differences(STUB.replace(line, "", 1)) == [name]
    own = name.split(".")[-1]
    old = line.replace(own, "old")
    assert differences(STUB.replace(line, line + old, 1)) == [
        name.replace(name.split(".")[-1], "old")
    ]

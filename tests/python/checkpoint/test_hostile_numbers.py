"""Tests of checkpoints whose numbers are too small, too large, or no numbers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from family_gguf import GGUF_MODELS, HYBRID_MODELS, write_family_gguf
from tiny_families import FAMILY_MODELS
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint import gguf
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint

# Each is outside the range of every size and factor.
NEVER_VALID = (-1, 2**63, 10**400, 1e300, math.nan, math.inf, "7", [[]])
# May be valid. It then must not decide how much memory or time is needed.
EXTREME = (0, 1, 3, 1.5, 2**30, 2**31 - 1, 2**31, True)
MAX_SECONDS = 1.0
# config.json has these keys for transformers only.
UNUSED = {
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
}
NAMES = {
    *("llama", "gemma3", "phi3-longrope-partial", "minimax-m2", "ministral3", "llama4"),
    *("glm4-moe", "granite-moe", "granite-4-h-moe", "falcon-h1-gate", "nemotron-h-latent"),
    *("lfm2", "qwen3-5-moe"),
}
TINY = {tiny.name: tiny for tiny in (*TINY_MODELS, *FAMILY_MODELS) if tiny.name in NAMES}

Path_ = tuple[str, ...]


def numbers(values: dict[str, Any], at: Path_ = ()) -> Iterator[Path_]:
    """Yield the places of all numbers of an object."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from numbers(value, (*at, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*at, key)


def changed(place: Path_, value: Any) -> dict[str, Any]:
    """Return the overrides that set one value."""
    for key in reversed(place):
        value = {key: value}
    result: dict[str, Any] = value
    return result


def check(open_it: Any, *, place: Path_, value: Any, source: str) -> None:
    """Open a checkpoint. It must work in time, or end with an error that names the field."""
    begin = time.monotonic()
    try:
        opened: Checkpoint = open_it()
        opened.config.to_engine("float16")
    except ModelFormatError as error:
        if value in NEVER_VALID:
            assert source in str(error) and place[-1] in str(error), (place, value)
    assert time.monotonic() - begin < MAX_SECONDS, (place, value)


@pytest.mark.parametrize("name", sorted(TINY))
def test_numbers_of_config_json_are_checked_before_they_are_used(name: str, tmp_path: Path) -> None:
    folder = save_model(make_model(TINY[name]), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    places = [place for place in numbers(config) if place[-1] not in UNUSED]
    assert len(places) > 10
    for place in places:
        for value in (*NEVER_VALID, *EXTREME):
            overrides = changed(place, value)
            check(
                lambda overrides=overrides: open_checkpoint(folder, overrides=overrides),
                place=place,
                value=value,
                source="config.json",
            )


@pytest.mark.parametrize(
    "made",
    [*(made for made in GGUF_MODELS[::4] if made not in HYBRID_MODELS), *HYBRID_MODELS],
    ids=lambda made: made.tiny.name,
)
def test_numbers_of_gguf_metadata_are_checked_before_they_are_used(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    write_family_gguf(made, make_model(made.tiny), path)
    real = gguf.GgufFile(path)
    own = {key: value for key, value in real.metadata.items() if key.startswith(f"{made.arch}.")}
    places = list(numbers(own))
    assert len(places) > 5
    monkeypatch.setattr(gguf, "GgufFile", lambda _: real)
    metadata = dict(real.metadata)
    for place in places:
        for value in (*NEVER_VALID, *EXTREME):
            real.metadata = {**metadata, place[0]: value}
            check(lambda: open_checkpoint(path), place=place, value=value, source="model.gguf")


QUANTIZED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"quant_method": "awq"}, "bits"),
    ({"quant_method": "awq"}, "group_size"),
    ({"quant_method": "gptq", "bits": 4}, "bits"),
    ({"quant_method": "gptq", "bits": 4}, "group_size"),
    ({"quant_method": "fp8"}, "weight_block_size"),
)


@pytest.mark.parametrize(("method", "field"), QUANTIZED, ids=str)
@pytest.mark.parametrize("value", [-2, 0, 2**31, 2**63, 1.5, math.nan, "128", [0, 128]], ids=repr)
def test_numbers_of_a_quantization_are_checked_before_they_are_used(
    method: dict[str, Any], field: str, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "plain"
    if not folder.exists():
        save_model(make_model(TINY_MODELS[0]), folder)
    given = [128, value] if field == "weight_block_size" else value
    overrides = {"quantization_config": {**method, field: given}}
    with pytest.raises(ModelFormatError, match=rf"config\.json.*{field} is "):
        open_checkpoint(folder, overrides=overrides)

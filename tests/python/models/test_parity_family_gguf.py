"""Tests that a GGUF file under llama.cpp's names gives the logits of transformers, by family."""

from pathlib import Path

import pytest
from engine_runs import EngineRun
from family_gguf import GGUF_MODELS, GgufModel, write_family_gguf
from parity import MAX_RELATIVE_ERROR, prompt, reference_logits, relative_error
from tiny_models import make_model

from lmdeploy.models import FAMILIES

# Architectures that other tests write, or whose tensors the tests of experts write.
_COVERED_ELSEWHERE = {"llama", "qwen2", "qwen3", "gpt-oss", "qwen2moe", "qwen3moe", "internlm2"}


@pytest.mark.parametrize("made", GGUF_MODELS, ids=lambda made: made.tiny.name)
def test_gguf_logits_equal_transformers(made: GgufModel, tmp_path: Path) -> None:
    model = make_model(made.tiny)
    write_family_gguf(made, model, tmp_path / "m.gguf")
    ids = prompt()
    with EngineRun(str(tmp_path / "m.gguf"), exact=True, session_len=256) as run:
        error = relative_error(run.logits(ids), reference_logits(model, ids))
    print(f"{made.tiny.name}: relative error {error:.2e}")
    assert error <= MAX_RELATIVE_ERROR


def test_every_gguf_architecture_is_compared() -> None:
    compared = {made.arch for made in GGUF_MODELS} | _COVERED_ELSEWHERE
    supported = {name for family in FAMILIES for name in family.gguf_architectures}
    assert supported <= compared

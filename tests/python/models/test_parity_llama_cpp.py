"""Tests that GGUF files of many families give llama.cpp's logits, if its package is installed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_runs import EngineRun
from family_gguf import GGUF_MODELS, LATENT_MODELS, GgufModel, resized, write_family_gguf
from parity import MAX_RELATIVE_ERROR, prompt, relative_error
from tiny_models import make_model

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

# llama.cpp reads GELU from a table with 16-bit inputs and values. Measured: 1.8e-4 to 2.3e-3.
_MAX_GELU_ERROR = 5e-3
_GELU = {"gemma2", "gemma3", "gemma4", "gemma4-experts", "gemma4-k-is-v", "starcoder2"}
# llama.cpp decides by the number of layers whether an EXAONE 4 has windows and whether queries of
# a DeepSeek-V2 have a latent. It ranks groups of experts by their two best in every model, as V3
# does, and takes the values of Qwen3.5's recurrent layers to be as wide as their keys.
_OTHER_STRUCTURE = {
    "exaone4",
    "deepseek-v2-groups",
    "deepseek-v2-lite",
    "qwen3-5",
    "qwen3-5-moe",
    "qwen3-next",
}
_LITE_LAYERS = 27
_MAX_DEEP_ERROR = 8e-5  # of so many layers instead of four. Measured: 3.9e-5.
_F32 = 0  # as ggml_type


def llama_cpp_logits(path: Path, ids: list[int]) -> np.ndarray:
    llama = llama_cpp.Llama(
        str(path), n_ctx=256, logits_all=True, verbose=False, type_k=_F32, type_v=_F32
    )
    llama.eval(ids)
    logits = np.array(llama.scores[: len(ids)])
    llama.close()
    return logits


def _same_structure() -> Iterator[GgufModel]:
    """Yield models like those of _OTHER_STRUCTURE that both engines compute alike."""
    groups, lite, _ = LATENT_MODELS
    settings = {**groups.tiny.settings, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    keys = {key: value for key, value in groups.keys.items() if "expert_group_" not in key}
    tiny = replace(groups.tiny, name="deepseek-v2", settings=settings)
    yield replace(groups, tiny=tiny, keys=keys)
    settings = {**lite.tiny.settings, "num_hidden_layers": _LITE_LAYERS}
    yield replace(lite, tiny=replace(lite.tiny, name="deepseek-v2-lite-27", settings=settings))
    for made in GGUF_MODELS:
        if made.tiny.name.startswith("qwen3-"):
            width, heads = made.keys["ssm.state_size"], made.keys["ssm.time_step_rank"]
            tiny = resized(made.tiny, {"linear_value_head_dim": width}, name=f"{made.tiny.name}-32")
            keys = {**made.keys, "ssm.inner_size": width * heads}
            if kinds := keys.get("attention.recurrent_layers"):
                keys["attention.recurrent_layers"] = kinds[: len(kinds) - made.unused_layers]
            yield replace(made, tiny=tiny, keys=keys, unused_layers=0)


@pytest.mark.parametrize(
    "made",
    [*(made for made in GGUF_MODELS if made.tiny.name not in _OTHER_STRUCTURE), *_same_structure()],
    ids=lambda made: made.tiny.name,
)
def test_gguf_logits_equal_llama_cpp(made: GgufModel, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_family_gguf(made, make_model(made.tiny), path)
    ids = prompt()
    with EngineRun(str(path), exact=True, session_len=256) as run:
        error = relative_error(run.logits(ids), llama_cpp_logits(path, ids))
    print(f"{made.tiny.name}: relative error {error:.1e}")
    limit = _MAX_GELU_ERROR if made.tiny.name in _GELU else MAX_RELATIVE_ERROR
    assert error <= (_MAX_DEEP_ERROR if made.tiny.name.endswith("-27") else limit)

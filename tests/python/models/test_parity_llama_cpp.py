"""Tests that GGUF files of many families give llama.cpp's logits, if its package is installed."""

from pathlib import Path

import numpy as np
import pytest
from engine_runs import EngineRun
from family_gguf import GGUF_MODELS, GgufModel, write_family_gguf
from parity import MAX_RELATIVE_ERROR, prompt, relative_error
from tiny_models import make_model

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

# llama.cpp reads GELU from a table with 16-bit inputs and values. Measured: 1.8e-4 to 2.3e-3.
_MAX_GELU_ERROR = 5e-3
_GELU = {"gemma2", "gemma3", "gemma4", "gemma4-experts", "gemma4-k-is-v", "starcoder2"}
# llama.cpp decides by the number of layers whether an EXAONE 4 has windows.
_OTHER_STRUCTURE = {"exaone4"}
_F32 = 0  # as ggml_type


def llama_cpp_logits(path: Path, ids: list[int]) -> np.ndarray:
    llama = llama_cpp.Llama(
        str(path), n_ctx=256, logits_all=True, verbose=False, type_k=_F32, type_v=_F32
    )
    llama.eval(ids)
    logits = np.array(llama.scores[: len(ids)])
    llama.close()
    return logits


@pytest.mark.parametrize(
    "made",
    [made for made in GGUF_MODELS if made.tiny.name not in _OTHER_STRUCTURE],
    ids=lambda made: made.tiny.name,
)
def test_gguf_logits_equal_llama_cpp(made: GgufModel, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_family_gguf(made, make_model(made.tiny), path)
    ids = prompt()
    with EngineRun(str(path), exact=True, session_len=256) as run:
        error = relative_error(run.logits(ids), llama_cpp_logits(path, ids))
    print(f"{made.tiny.name}: relative error {error:.1e}")
    assert error <= (_MAX_GELU_ERROR if made.tiny.name in _GELU else MAX_RELATIVE_ERROR)

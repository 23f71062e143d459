"""GGUF tokenizers against llama.cpp's test vectors.

TM_GGUF_VECTORS names a folder of ggml-vocab-*.gguf with their .inp and .out files, such as
`vendor/llama.cpp/models` of an unpacked llama-cpp-python source distribution.
"""

import os
from pathlib import Path

import pytest

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.checkpoint.files.gguf_file import GgufFile

FOLDER = os.environ.get("TM_GGUF_VECTORS", "")
VOCABS = sorted(Path(FOLDER).glob("ggml-vocab-*.gguf")) if FOLDER else []


@pytest.mark.skipif(not VOCABS, reason="TM_GGUF_VECTORS names no folder of ggml-vocab-*.gguf")
@pytest.mark.parametrize("vocab", VOCABS, ids=lambda path: path.stem)
def test_ids_equal_llama_cpp(vocab: Path) -> None:
    out = Path(f"{vocab}.out")
    if not out.is_file():
        pytest.skip(f"{out} does not exist")
    try:
        tokenizer = tokenizer_from_gguf(GgufFile(vocab).metadata, vocab.name)
    except ModelFormatError as error:
        pytest.skip(f"refused: {error}")
    texts = Path(f"{vocab}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    rows = [[int(word) for word in line.split()] for line in out.read_text("utf-8").splitlines()]
    for text, expected in zip(texts, rows, strict=False):
        assert tokenizer.encode(text, add_special=False) == expected, text

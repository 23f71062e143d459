"""Compare our GGUF tokenizers with llama.cpp's test vectors.

Usage: python scripts/dev/check_tokenizers.py FOLDER

FOLDER contains ggml-vocab-*.gguf with their .inp and .out files: `vendor/llama.cpp/models` of an
unpacked llama-cpp-python source distribution, or `models` of llama.cpp itself.
"""

import argparse
import sys
from pathlib import Path

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.checkpoint.files.gguf_file import GgufFile

_SEPARATOR = "\n__ggml_vocab_test__\n"


def read_vectors(vocab: Path) -> list[tuple[str, list[int]]]:
    """Return (text, ids) of each test of a vocabulary."""
    texts = Path(f"{vocab}.inp").read_text(encoding="utf-8").split(_SEPARATOR)
    lines = Path(f"{vocab}.out").read_text(encoding="utf-8").splitlines()
    rows = [[int(word) for word in line.split()] for line in lines]
    return list(zip(texts[: len(rows)], rows, strict=True))


def check(vocab: Path, verbose: bool) -> str:
    """Return one line about a vocabulary; it begins with `ok`, `FAIL` or `refused`."""
    try:
        tokenizer = tokenizer_from_gguf(GgufFile(vocab).metadata, vocab.name)
    except ModelFormatError as error:
        return f"refused  {error}"
    vectors = read_vectors(vocab)
    wrong = 0
    for text, expected in vectors:
        ids = tokenizer.encode(text, add_special=False)
        if ids != expected:
            wrong += 1
            if verbose:
                print(f"  {text!r}\n    got    {ids}\n    expected {expected}")
    state = "FAIL    " if wrong else "ok      "
    return f"{state} {vocab.name}: {len(vectors) - wrong} of {len(vectors)} vectors"


def main() -> int:
    """Check every vocabulary of the folder. Return 1 if an accepted one differs."""
    parser = argparse.ArgumentParser(description="compare GGUF tokenizers with llama.cpp's ids")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print every difference")
    arguments = parser.parse_args()
    vocabs = [
        path
        for path in sorted(arguments.folder.glob("ggml-vocab-*.gguf"))
        if Path(f"{path}.out").is_file()
    ]
    if not vocabs:
        print(f"{arguments.folder}: no ggml-vocab-*.gguf with .inp and .out", file=sys.stderr)
        return 2
    lines = [check(vocab, arguments.verbose) for vocab in vocabs]
    print("\n".join(lines))
    return int(any(line.startswith("FAIL") for line in lines))


if __name__ == "__main__":
    sys.exit(main())

"""Metadata of GGUF vocabularies."""

from typing import Any


def sentence_piece_metadata(**changes: Any) -> dict[str, Any]:
    """Return a SentencePiece vocabulary of bytes, letters and words; later pieces score lower."""
    pieces = ["▁", "a", "b", "c", "é", "ab", "▁a", "abc", "▁ab", "bc", "▁abc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}

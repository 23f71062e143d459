"""Sizes of rows, tokens and blocks in bytes, from the layout formulas."""

from dataclasses import dataclass

from reference.codecs import BITS, GROUP, GROUPED, INTEGERS

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ALIGNMENT = 16


def payload_bytes(mode: str, head_dim: int, dtype: str) -> int:
    """Return the payload bytes of one row of K or V."""
    if mode == "none":
        return head_dim * ELEMENT_BYTES[dtype]
    return head_dim * BITS[mode] // 8


def param_bytes(mode: str, dtype: str) -> int:
    """Return the bytes of the (scale, zero) pair of one row, stored in the data pool."""
    return 2 * ELEMENT_BYTES[dtype] if mode in INTEGERS else 0


def scale_bytes(mode: str, head_dim: int) -> int:
    """Return the bytes of one row in the scale pool."""
    return head_dim // GROUP if mode in GROUPED else 0


def row_bytes(mode: str, head_dim: int, dtype: str = "bfloat16") -> int:
    """Return all bytes of one row of K or V."""
    return (
        payload_bytes(mode, head_dim, dtype)
        + param_bytes(mode, dtype)
        + scale_bytes(mode, head_dim)
    )


@dataclass(frozen=True)
class Shape:
    """One layer group whose layers all use one format for K and V."""

    layers: int
    kv_heads: int
    head_dim: int
    block_seq_len: int = 64
    dtype: str = "bfloat16"

    def bytes_per_token(self, mode: str) -> int:
        """Return the bytes of K and V of one token in all layers, metadata and scales included."""
        return 2 * self.layers * self.kv_heads * row_bytes(mode, self.head_dim, self.dtype)

    def block_bytes(self, mode: str) -> int:
        """Return the bytes of one block in the data pool."""
        rows = 2 * self.layers * self.kv_heads * self.block_seq_len
        return rows * (
            payload_bytes(mode, self.head_dim, self.dtype) + param_bytes(mode, self.dtype)
        )

    def scale_block_bytes(self, mode: str) -> int:
        """Return the bytes of one block in the scale pool."""
        rows = 2 * self.layers * self.kv_heads * self.block_seq_len
        return rows * scale_bytes(mode, self.head_dim)

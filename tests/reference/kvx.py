"""KVX in NumPy, from its specification: where each value of a cache lies, and what the calls do.

A cache tensor is a flat array of elements as unsigned integers. Shapes and strides are those of its
descriptor, in elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reference.floats import encode_e4m3, encode_e5m2, from_bits, to_bits

Integers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.unsignedinteger]

FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
UINTS = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32, "E4M3": np.uint8, "E5M2": np.uint8}


@dataclass
class Side:
    """K or V of a cache."""

    layout: str  # NHD, HND, HND_PACKED, CUSTOM
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    memory: Bits

    def places(self, block: Integers, offset: Integers) -> Integers:
        """Return the index of each value of some tokens, [tokens, heads, head_dim]."""
        axes = {"HND": (0, 2, 1, 3), "HND_PACKED": (0, 3, 1, 2, 4)}.get(self.layout, (0, 1, 2, 3))
        sizes = [self.shape[axis] for axis in axes]
        steps = [self.stride[axis] for axis in axes]
        head = np.arange(sizes[2])[None, :, None]
        at = block[:, None, None] * steps[0] + offset[:, None, None] * steps[1] + head * steps[2]
        if self.layout != "HND_PACKED":
            return at + np.arange(sizes[3]) * steps[3]
        dim = np.arange(sizes[3] * sizes[4])
        return at + dim // sizes[4] * steps[3] + dim % sizes[4] * steps[4]


def convert(bits: Bits, given: str, wanted: str, *, scale: npt.NDArray[np.float32]) -> Bits:
    """Return rows in another dtype. FP8 codes are those of x / scale."""
    if given == wanted or bits.size == 0:
        return bits
    rows = np.ascontiguousarray(bits.reshape(-1, bits.shape[-1]))
    values = from_bits(rows.view(np.uint8), FLOATS[given]).reshape(bits.shape)
    if wanted in FLOATS:
        flat = to_bits(values.reshape(rows.shape), FLOATS[wanted])
        return np.ascontiguousarray(flat).view(UINTS[wanted]).reshape(bits.shape)
    scaled = (values / scale).astype(np.float32)
    return (encode_e4m3 if wanted == "E4M3" else encode_e5m2)(scaled).astype(np.uint8)


def write(
    side: Side, rows: Bits, dtype: str, *, slots: Integers, invalid: int, scales: Bits
) -> None:
    """Store rows [tokens, heads, head_dim] in order. `scales` is [blocks, heads]."""
    block_size = side.shape[{"HND": 2, "HND_PACKED": 3}.get(side.layout, 1)]
    for token, slot in enumerate(slots):
        if slot < 0 or slot == invalid:
            continue
        block, offset = divmod(int(slot), block_size)
        at = side.places(np.array([block]), np.array([offset]))
        scale = scales[block][None, :, None]
        side.memory[at] = convert(rows[token : token + 1], dtype, side.dtype, scale=scale)


def gather(side: Side, rows: Bits, dtype: str, *, blocks: list[Integers], block_size: int) -> None:
    """Read the tokens of sequences into rows [seqs, tokens, heads, head_dim].

    `blocks` has the block of each token that is read, by sequence.
    """
    for seq, of_tokens in enumerate(blocks):
        count = len(of_tokens)
        stored = side.memory[side.places(of_tokens, np.arange(count) % block_size)]
        rows[seq, :count] = convert(stored, side.dtype, dtype, scale=np.ones(1, np.float32))

"""Copies of the cached KV blocks of a prefix, and their form as bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import show

_NAME = "lmdeploy_kv_blocks"
_VERSION = 1
_MAX_BLOCKS = 1 << 20
_MAX_POOLS = 256


@dataclass(frozen=True)
class KvBlocks:
    """Copies of the cached blocks of a prefix. `Pipeline.export_prefix` makes them.

    Args:
        identity: what determines the bytes: the model, the KV formats, the quality and others.
            An engine accepts only blocks of its own identity.
        tokens: token ids of the prefix, len(blocks) * block_tokens.
        block_tokens: tokens of a block.
        blocks: by block and pool of the cache; b"" if that pool has no copy of the block.
    """

    identity: dict[str, Any]
    tokens: list[int]
    block_tokens: int
    blocks: list[list[bytes]]

    @property
    def num_bytes(self) -> int:
        """Return the size of all copies."""
        return sum(len(copy) for block in self.blocks for copy in block)

    def to_bytes(self) -> bytes:
        """Return a safetensors file. Its metadata describes the blocks as JSON."""
        from safetensors.numpy import save

        about = {
            "version": _VERSION,
            "identity": self.identity,
            "block_tokens": self.block_tokens,
            "tokens": self.tokens,
            "num_pools": len(self.blocks[0]) if self.blocks else 0,
        }
        tensors = {
            f"{i}.{pool}": np.frombuffer(copy, np.uint8)
            for i, block in enumerate(self.blocks)
            for pool, copy in enumerate(block)
            if copy
        }
        return save(tensors, {_NAME: json.dumps(about)})

    @classmethod
    def from_bytes(cls, data: bytes) -> KvBlocks:
        """Read what `to_bytes` returned. Raise ValueError if `data` is something else."""
        about, tensors = _parts(data)
        identity, tokens = about.get("identity"), about.get("tokens")
        block_tokens, num_pools = about.get("block_tokens"), about.get("num_pools")
        if (
            about.get("version") != _VERSION
            or not isinstance(identity, dict)
            or not isinstance(tokens, list)
            or not all(type(token) is int and 0 <= token < 2**31 for token in tokens)
            or type(block_tokens) is not int
            or type(num_pools) is not int
            or not 0 < block_tokens <= 1 << 20
            or not 0 <= num_pools <= _MAX_POOLS
            or len(tokens) % block_tokens != 0
            or len(tokens) // block_tokens > _MAX_BLOCKS
        ):
            raise _damaged("Its description is not complete.")
        blocks = [[b""] * num_pools for _ in range(len(tokens) // block_tokens)]
        for name, tensor in tensors.items():
            row, _, pool = name.partition(".")
            is_place = row.isdecimal() and pool.isdecimal() and len(row) < 9 and len(pool) < 9
            is_place = is_place and tensor.dtype == np.uint8 and tensor.ndim == 1
            if not is_place or int(row) >= len(blocks) or int(pool) >= num_pools:
                raise _damaged(f"It has a tensor {show(name)}.")
            blocks[int(row)][int(pool)] = tensor.tobytes()
        return cls(identity, tokens, block_tokens, blocks)


def _parts(data: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return the description of a blob and its tensors. Raise ValueError if it is not one."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(data)  # checks the header, sizes and offsets
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        about = json.loads(header["__metadata__"][_NAME])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, struct.error):
        raise _damaged("It is not a safetensors file with a description of blocks.") from None
    if not isinstance(about, dict):
        raise _damaged("Its description is not a JSON object.")
    return about, tensors


def _damaged(reason: str) -> ValueError:
    return ValueError(f"The data are not KV blocks. {reason} Pass what KvBlocks.to_bytes returned.")


def pack_copies(copies: Sequence[bytes]) -> bytes:
    """Return the copies of one block as bytes, for a store."""
    sizes = struct.pack(f"<I{len(copies)}Q", len(copies), *map(len, copies))
    return sizes + b"".join(copies)


def unpack_copies(data: bytes) -> list[bytes] | None:
    """Return what `pack_copies` got, or None if `data` is something else."""
    if len(data) < 4:
        return None
    (num_pools,) = struct.unpack_from("<I", data)
    if num_pools > _MAX_POOLS or len(data) < 4 + 8 * num_pools:
        return None
    sizes = struct.unpack_from(f"<{num_pools}Q", data, 4)
    begin = 4 + 8 * num_pools
    if begin + sum(sizes) != len(data):
        return None
    copies = []
    for size in sizes:
        copies.append(data[begin : begin + size])
        begin += size
    return copies

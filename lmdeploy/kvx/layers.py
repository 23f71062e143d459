"""One layer of exported KV blocks, as libkvx reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import check_int, refuse
from lmdeploy.kv_store.blocks import KvBlocks
from lmdeploy.kvx import abi, check, library
from lmdeploy.kvx.arrays import DTYPES

_NONE = ["none", "none"]


class KvLayer(NamedTuple):
    """A layer over the bytes of some blocks.

    Block i of `layer` is block `blocks[i]` of the prefix. `memory` holds the bytes of all layers of
    its pool and must outlive `layer`.
    """

    layer: abi.TmLayer
    blocks: list[int]
    memory: npt.NDArray[np.uint8]


def layer_of(blocks: KvBlocks, index: int, *, window16: bool = False) -> KvLayer:
    """Return a layer of the blocks, or its copies in the window.

    Raise ValueError for a layer that does not exist, for a calibrated cache, whose constants do
    not travel with the blocks, and for quantized keys of a model with a bias of K, which lack
    a part of it.
    """
    identity = blocks.identity
    formats = identity["layers"]
    check_int("index", index, low=0, high=len(formats) - 1)
    if "rotary_dim" in identity:
        raise refuse("rotary_dim", identity["rotary_dim"], wanted="absent: KVX has no latents")
    if identity["calibration"] is not None:
        raise refuse("calibration", identity["calibration"], wanted="None")
    if "k_bias" in identity and formats[index][0] != "none":
        wanted = "absent, because these keys lack a part of it. Export K in 16 bits (k=none)"
        raise refuse("k_bias", identity["k_bias"], wanted=wanted)
    has_window16 = identity["recent_tokens"] >= 0
    if window16 and not has_window16:
        raise refuse("window16", window16, wanted="False, because the cache has no window")
    # As MakeLayerGroups does: a group for each length of a sliding window, and for 16-bit layers.
    keys = [
        (window, has_window16 and pair == _NONE)
        for window, pair in zip(identity["windows"], formats, strict=True)
    ]
    groups = sorted(set(keys), key=lambda key: (key[0] < 0, *key))  # chunks are negative
    pool = groups.index(keys[index]) + (len(groups) if window16 else 0)
    members = [i for i, key in enumerate(keys) if key == keys[index]]
    parts = [_describe(identity, formats[i], window16=window16) for i in members]
    data_bytes = sum(part.block_bytes for part in parts)
    scale_bytes = sum(part.scale_block_bytes for part in parts)
    found = [i for i, copies in enumerate(blocks.blocks) if copies[pool]]
    copies = [np.frombuffer(blocks.blocks[i][pool], np.uint8) for i in found]
    if any(copy.size != data_bytes + scale_bytes for copy in copies):
        wanted = f"{data_bytes + scale_bytes} bytes per block"
        raise refuse("blocks", [copy.size for copy in copies], wanted=wanted)
    memory = np.concatenate([np.empty(0, np.uint8), *copies])
    place = members.index(index)
    layer = parts[place]
    layer.num_blocks = len(found)
    layer.data = memory.ctypes.data + sum(part.block_bytes for part in parts[:place])
    if scale_bytes:
        offset = sum(part.scale_block_bytes for part in parts[:place])
        layer.scales = memory.ctypes.data + data_bytes + offset
    layer.block_bytes = layer.scale_block_bytes = data_bytes + scale_bytes
    return KvLayer(layer, found, memory)


def _mode(name: str) -> abi.TmMode:
    return abi.TmMode["FP8_E4M3" if name == "fp8" else name.upper()]


def _describe(identity: dict[str, Any], pair: Sequence[str], *, window16: bool) -> abi.TmLayer:
    """Return a layer with the sizes of its own blocks and without memory."""
    dtype = DTYPES[identity["dtype"]]
    # As MakeLayerGroups does: blocks have offsets if their keys are quantized after all are known.
    is_written = window16 or identity["recent_tokens"] < 0
    has_offset = "k_offset" in identity and not is_written
    if window16:
        pair = _NONE if pair[0] == "none" else [identity.get("window", "none")] * 2
    layer = abi.TmLayer(_mode(pair[0]), _mode(pair[1]), dtype, abi.Memory.HOST)
    layer.block_size = identity["block_tokens"]
    layer.num_kv_heads, layer.head_dim = identity["num_kv_heads"], identity["head_dim"]
    layer.flags = (abi.TmFlag.ROTATED if identity["rotation"] else 0) | (
        abi.TmFlag.SEARCH if identity["scale_search"] else 0
    )
    if has_offset and pair[0] != "none":
        layer.flags |= abi.TmFlag.K_OFFSET
    check(library().kvx_tm_describe(layer))
    return layer

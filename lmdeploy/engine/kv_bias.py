"""Warn of a bias of K that the K offsets of a cache leave in its keys."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmdeploy import _turbomind
    from lmdeploy.engine.kv_quality import KvOptions

logger = logging.getLogger("lmdeploy")

# Beyond this amplitude, quantized keys have more than 5 times the KL divergence that they have
# without the bias (docs/accuracy.md).
MAX_BIAS_LEFT = 10.0


def warn_of_bias(
    options: KvOptions,
    *,
    model: _turbomind.ModelConfig,
    weights: _turbomind.Weights,
    device: _turbomind.Device,
    block_seq_len: int,
) -> None:
    """Log a warning if quantized keys keep a large bias."""
    from lmdeploy import _turbomind

    values = {pair.v for pair in options.layers if pair.k != "none"}
    if not model.k_bias or not values:
        return
    if not options.k_offset:
        logger.warning(
            "KV cache: K has a bias, which costs %s most of its accuracy without a K offset. Use "
            "--kv-k-offset block.",
            options.format,
        )
        return
    left = _turbomind.k_bias_left(model, weights, device, block_seq_len=block_seq_len)
    if left > MAX_BIAS_LEFT:
        logger.warning(
            "KV cache: the bias of K has up to %.0f in high frequencies, which a K offset does not "
            "remove, so that %s loses accuracy. Use --kv-cache-format k=none,v=%s to keep K in 16 "
            "bits.",
            left,
            options.format,
            next((value for value in sorted(values) if value.endswith("4")), "nvfp4"),
        )

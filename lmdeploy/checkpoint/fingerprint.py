"""A cheap fingerprint of a model, so that a file made for one model is refused by another."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from lmdeploy.checkpoint.hub import resolve_model
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint

# Of each tensor, from both ends: any training step changes them, and reading them costs nothing.
_SAMPLE_BYTES = 4096


def hash_model(path: str) -> str:
    """SHA-256 (hex) over the config and, of each tensor, name, format, shape and both ends."""
    return hash_checkpoint(open_checkpoint(resolve_model(path)))


def hash_checkpoint(checkpoint: Checkpoint) -> str:
    """`hash_model` of an opened checkpoint. File names and places do not matter."""
    digest = hashlib.sha256()
    config = dataclasses.asdict(checkpoint.config)
    if checkpoint.config.moe is None:
        # As before there were experts, so that files made for a dense model stay valid.
        del config["moe"], config["swiglu_limit"]
    digest.update(json.dumps([checkpoint.family.name, config], sort_keys=True).encode())
    for planned in sorted(checkpoint.tensors, key=lambda planned: planned.name):
        tensor = planned.tensor
        facts = [planned.name, tensor.format, list(tensor.shape), planned.interleaved_heads]
        digest.update(json.dumps(facts).encode())
        digest.update(tensor.raw[:_SAMPLE_BYTES].tobytes())
        digest.update(tensor.raw[-_SAMPLE_BYTES:].tobytes())
        for part in tensor.parts[1:]:
            digest.update(part[-_SAMPLE_BYTES:].tobytes())
    return digest.hexdigest()

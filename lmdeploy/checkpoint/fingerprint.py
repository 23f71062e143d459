"""Compute fingerprints of a checkpoint, so that a file for another model is rejected."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmdeploy.base.files import release_pages
from lmdeploy.checkpoint.files.gguf_parts import part_paths
from lmdeploy.checkpoint.hub import resolve_model
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint
from lmdeploy.checkpoint.tensor_plan import PlannedTensor
from lmdeploy.models.decoder_config import BranchSettings

# Bytes hashed at both ends of each tensor. Any training step changes them.
_SAMPLE_BYTES = 4096
# The coarsest timestamps of a file system (FAT). Others have 10 ms or less.
SETTLE_NS = 2_000_000_000


@dataclass(frozen=True)
class FileIdentities:
    """The identity of each weight file. The kernel sets a ctime at every change of a file."""

    files: tuple[tuple[str, int, int, int, int], ...]  # path, size, inode, mtime, ctime
    read_ns: int  # the time at which they were read

    @property
    def is_stable(self) -> bool:
        """Return whether every later change of a file has another ctime."""
        newest = max((ctime for *_, ctime in self.files), default=0)
        return newest + SETTLE_NS < self.read_ns


def identify_files(path: Path) -> FileIdentities:
    """Return the identities of a resolved model's weight files. Call it before opening them.

    Raise ModelFormatError if a part of a GGUF file is missing.
    """
    read_ns = time.time_ns()
    # With the index of a folder, and all parts of a GGUF file.
    files = part_paths(path) if path.is_file() else sorted(path.glob("*.safetensors*"))
    identities = []
    for file in files:
        try:
            status = file.stat()
            resolved = str(file.resolve())
        except (OSError, RuntimeError):  # a dangling link, or a link to itself
            continue
        numbers = (status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        identities.append((resolved, *numbers))
    return FileIdentities(tuple(identities), read_ns)


def hash_model(path: str) -> str:
    """Return `hash_checkpoint` of a model that is not open yet."""
    return hash_checkpoint(open_checkpoint(resolve_model(path)))


def hash_checkpoint(
    checkpoint: Checkpoint, *, include: Callable[[PlannedTensor], bool] = lambda _: True
) -> str:
    """Return a SHA-256 (hex) of the config and of name, format, shape and both ends of tensors.

    Names and locations of files do not matter.

    Args:
        include: selects the tensors that are hashed.
    """
    digest = hashlib.sha256()
    config = dataclasses.asdict(checkpoint.config)
    if checkpoint.config.moe is None:
        # Keep the hashes of dense models that were made before there were experts.
        del config["moe"], config["swiglu_limit"]
    if checkpoint.config.recurrent is None:
        del config["recurrent"], config["structure"]["attention_gate"]  # as above
    if checkpoint.config.branches == BranchSettings():
        del config["branches"]  # as above
    digest.update(json.dumps([checkpoint.family.name, config], sort_keys=True).encode())
    for planned in sorted(filter(include, checkpoint.tensors), key=lambda planned: planned.name):
        tensor = planned.tensor
        metadata = [planned.name, tensor.format, list(tensor.shape), planned.interleaved_heads]
        if planned.scale != 1.0:
            metadata.append(planned.scale)
        digest.update(json.dumps(metadata).encode())
        digest.update(tensor.raw[:_SAMPLE_BYTES].tobytes())
        for part in tensor.parts:
            digest.update(part[-_SAMPLE_BYTES:].tobytes())
            release_pages(part)  # the kernel reads many more pages than the two that are hashed
    return digest.hexdigest()

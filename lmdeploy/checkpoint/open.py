"""Open a Hugging Face folder or a GGUF file, and check its config and tensor names.

This does not read the weights. It looks up tensors and compares their shapes with the config, so
that a bad checkpoint fails before memory is allocated.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.gguf import open_gguf
from lmdeploy.checkpoint.hf import open_folder
from lmdeploy.checkpoint.tensor_plan import Checkpoint, PlannedTensor

__all__ = ["Checkpoint", "PlannedTensor", "open_checkpoint"]


def open_checkpoint(path: Path, *, overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a folder or a .gguf file. `overrides` replace values of config.json.

    Raise ModelFormatError for anything that is not supported.
    """
    if path.is_file() and overrides:
        raise ModelFormatError(
            f"{path}: hf_overrides need a config.json, which a GGUF file does not have. Remove "
            "--hf-overrides."
        )
    if path.is_file():
        return open_gguf(path)
    if (path / "config.json").is_file():
        return open_folder(path, overrides or {})
    raise ModelFormatError(
        f"{path}: The folder has no config.json. Give a Hugging Face model folder or a .gguf file."
    )

"""A model's config and tensor names, from a Hugging Face folder or a GGUF file, all checked.

Nothing of the weights is read here: tensors are looked up and their shapes compared with the
config, so that a bad checkpoint fails before any memory is taken.
"""

from pathlib import Path

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.gguf import open_gguf
from lmdeploy.checkpoint.hf import open_folder
from lmdeploy.checkpoint.tensor_plan import Checkpoint, PlannedTensor

__all__ = ["Checkpoint", "PlannedTensor", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder or a .gguf file; ModelFormatError for everything that does not fit."""
    if path.is_file():
        return open_gguf(path)
    if (path / "config.json").is_file():
        return open_folder(path)
    raise ModelFormatError(
        f"{path}: no config.json in this folder; wanted a Hugging Face model folder or a .gguf file"
    )

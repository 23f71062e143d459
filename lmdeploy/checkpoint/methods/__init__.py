"""Quantization methods of Hugging Face folders: one module each, and the registry.

A method shows a matrix that its checkpoint stores as several tensors as one tensor, whose `matrix`
knows how to become rows of a format that the engine computes.
"""

from collections.abc import Callable

from lmdeploy.checkpoint.files.tensor_file import TensorFile
from lmdeploy.checkpoint.methods.awq import open_awq
from lmdeploy.models.config_reader import ConfigReader

# Takes the folder's tensors, its `quantization_config` and its name for errors. Raises
# ModelFormatError for a variant of the method that is not supported.
OpenMethod = Callable[[TensorFile, ConfigReader, str], TensorFile]

# `quant_method` of config.json → what opens such a folder.
METHODS: dict[str, OpenMethod] = {
    "awq": open_awq,
}

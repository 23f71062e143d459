"""The registry of quantization methods of Hugging Face folders. Each method is one module.

A method combines the several tensors of a stored matrix into one tensor. The `matrix` of that
tensor converts rows to a format that the engine computes.
"""

from collections.abc import Callable

from lmdeploy.checkpoint.files.tensor_file import TensorFile
from lmdeploy.checkpoint.methods.awq import open_awq
from lmdeploy.models.config_reader import ConfigReader

# Parameters: the tensors of the folder, its `quantization_config`, and its name for errors. Raises
# ModelFormatError for a variant of the method that is not supported.
OpenMethod = Callable[[TensorFile, ConfigReader, str], TensorFile]

# Maps `quant_method` of config.json to the function that opens such a folder.
METHODS: dict[str, OpenMethod] = {
    "awq": open_awq,
}

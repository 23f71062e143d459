"""The registry of quantization methods of Hugging Face folders. Each method is one module.

A method combines the several tensors of a stored matrix into one tensor. The `matrix` of that
tensor converts rows to a format that the engine computes.
"""

from typing import Protocol

from lmdeploy.checkpoint.files.tensor_file import TensorFile
from lmdeploy.checkpoint.methods.auto_round import open_auto_round
from lmdeploy.checkpoint.methods.awq import open_awq
from lmdeploy.checkpoint.methods.compressed_tensors import open_compressed_tensors
from lmdeploy.checkpoint.methods.fp8 import open_fbgemm_fp8, open_fp8
from lmdeploy.checkpoint.methods.gptq import open_gptq
from lmdeploy.checkpoint.methods.modelopt import open_modelopt
from lmdeploy.models.config_reader import ConfigReader


class OpenMethod(Protocol):
    """Opens the tensors of a folder."""

    def __call__(self, file: TensorFile, quantization: ConfigReader, *, source: str) -> TensorFile:
        """Return the tensors of `file` with whole matrices.

        `quantization` is the folder's `quantization_config`, and `source` names the folder in
        errors. Raise ModelFormatError for a variant of the method that is not supported.
        """


# Maps `quant_method` of config.json to the function that opens such a folder.
METHODS: dict[str, OpenMethod] = {
    "awq": open_awq,
    "gptq": open_gptq,
    "auto-round": open_auto_round,
    "compressed-tensors": open_compressed_tensors,
    "fp8": open_fp8,
    "fbgemm_fp8": open_fbgemm_fp8,
    "modelopt": open_modelopt,
}

"""Read folders of NVIDIA's ModelOpt: FP8 with a scale per tensor, and NVFP4.

The tensors decide how a matrix is read, so the lists of excluded modules are not needed.
"""

from __future__ import annotations

from lmdeploy.checkpoint.files.tensor_file import StoredTensor, TensorFile
from lmdeploy.checkpoint.methods.fp4 import SCALE, nvfp4_tensor
from lmdeploy.checkpoint.methods.fp8 import fp8_tensor
from lmdeploy.checkpoint.methods.matrix_file import MatrixFile, Parts
from lmdeploy.models.config_reader import ConfigReader

_CODES, _NUMBER = "weight", "weight_scale_2"
_UNUSED = ("input_scale", "activation_scale")
_NVFP4_GROUP = 16
# The second has 16-bit activations. In the third, the layers have algorithms of their own.
_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")
_MIXED = "MIXED_PRECISION"


def open_modelopt(file: TensorFile, quantization: ConfigReader, *, source: str) -> TensorFile:
    """Open FP8 and NVFP4 weights of ModelOpt. Raise ModelFormatError for another algorithm."""
    _check_algorithm(quantization, (*_ALGORITHMS, _MIXED))
    layers = quantization.child("quantized_layers")
    for key in layers.keys() if layers is not None else ():
        layer = None if layers is None else layers.child(key)
        if layer is not None:
            _check_algorithm(layer, _ALGORITHMS)

    def combine(parts: Parts) -> StoredTensor:
        if parts.has(_NUMBER):
            return nvfp4_tensor(parts, _CODES, number=_NUMBER, divides=False)
        return fp8_tensor(parts, SCALE)

    return MatrixFile(
        file, marks=(SCALE, _NUMBER), others=(_CODES, *_UNUSED), combine=combine, source=source
    )


def _check_algorithm(reader: ConfigReader, accepted: tuple[str, ...]) -> None:
    """Raise ModelFormatError for an algorithm or a size of groups that is not supported."""
    algorithm = reader.text("quant_algo", default="FP8")
    if algorithm not in accepted:
        raise reader.refuse(
            f"quant_algo is {algorithm[:40]!r}. It must be one of {', '.join(accepted)}."
        )
    is_nvfp4 = algorithm.endswith("NVFP4")
    if is_nvfp4 and (size := reader.integer("group_size", default=_NVFP4_GROUP)) != _NVFP4_GROUP:
        raise reader.refuse(f"group_size is {size} for {algorithm}. It must be {_NVFP4_GROUP}.")

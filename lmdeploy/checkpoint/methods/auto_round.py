"""Read AutoRound's weights of 4 and 8 bits, which are packed as those of GPTQ or AWQ.

`packing_format` names the layout. The scales of a symmetric matrix may be negative, because the
largest weight of a group becomes the code 0 (`quant_tensor_sym` in auto_round/data_type/int.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from lmdeploy.checkpoint.files.tensor_file import TensorFile
from lmdeploy.checkpoint.methods.awq import open_awq
from lmdeploy.checkpoint.methods.gptq import open_gptq
from lmdeploy.models.config_reader import ConfigReader

_OPEN = {
    "auto_round:auto_gptq": open_gptq,
    "auto_round:gptq": open_gptq,
    "auto_round:auto_awq": open_awq,
    "auto_round:awq": open_awq,
}
_MIN_FLOAT_BITS = 16  # a module with as many bits is not quantized


def open_auto_round(file: TensorFile, quantization: ConfigReader, *, source: str) -> TensorFile:
    """Open AutoRound weights. Raise ModelFormatError for a variant that is not supported."""
    packing = quantization.text("packing_format", default="auto_round:auto_gptq")
    if packing not in _OPEN:
        wanted = ", ".join(_OPEN)
        raise quantization.refuse(
            f"packing_format is {packing[:40]!r}. It must be one of {wanted}."
        )
    data_type = quantization.text("data_type", default="int")
    if data_type != "int":
        raise quantization.refuse(f"data_type is {data_type[:40]!r}. It must be int.")
    bits = quantization.integer("act_bits", default=_MIN_FLOAT_BITS)
    if bits < _MIN_FLOAT_BITS:
        raise quantization.refuse(f"act_bits is {bits}. It must be {_MIN_FLOAT_BITS} or more.")
    is_symmetric = quantization.flag("sym", default=True)
    if (modules := quantization.child("extra_config")) is not None:
        common = {
            "bits": quantization.integer("bits"),
            "group_size": quantization.integer("group_size", default=128, low=-1),
            "sym": is_symmetric,
        }
        _check_modules(modules, common)
    return _OPEN[packing](file, quantization, source=source, has_sign=is_symmetric)


def _check_modules(modules: ConfigReader, common: Mapping[str, object]) -> None:
    """Raise ModelFormatError if a quantized module has other settings than the common ones.

    The tensors show which modules are not quantized.
    """
    for name in sorted(modules.keys()):
        settings = modules.child(name)
        if settings is not None and settings.integer("bits", default=1) < _MIN_FLOAT_BITS:
            settings.require(common)

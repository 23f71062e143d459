"""Values of stored rows, and the bits of BF16."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmdeploy.checkpoint.files.tensor_file import BLOCK_FORMATS


def bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Convert FP32 to BF16 bits, rounding to nearest even. NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(
        16
    )
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def values_of_rows(stored_format: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the FP32 values of whole rows of bytes [n, bytes] in one of SUPPORTED_FORMATS."""
    if stored_format == "F32":
        return np.asarray(rows.view("<f4"), np.float32)
    if stored_format == "F16":
        return rows.view("<f2").astype(np.float32)
    if stored_format == "BF16":
        return (rows.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert stored_format in BLOCK_FORMATS
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values: npt.NDArray[np.float32] = dequantize(rows, GGMLQuantizationType[stored_format])
    return values

"""Random tensors of a checkpoint: names, shapes and formats, for safetensors and for GGUF.

Matrices have the standard deviation 1/sqrt(columns), so that outputs of a normed input have unit
variance. Norms are 1, biases and attention sinks are small, and the logits have LOGIT_STD.

A value is `mean + std * z`, where z is one of 256 quantiles of the normal distribution, or a random
code of a quantized format with scales that give the same standard deviation. The bytes of a tensor
depend only on the seed and its name, so that a shorter model has the first layers of a longer one.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdeploy.checkpoint.tensor_plan import as_location, is_in_layer
from lmdeploy.models.decoder_config import DecoderConfig
from lmdeploy.models.experts import TensorLocation
from lmdeploy.models.family import ModelFamily, TensorNames
from lmdeploy.models.tensor_shapes import tensor_shapes

Bytes = npt.NDArray[np.uint8]

PIECE_VALUES = 1 << 22  # values of one piece, so that an array has at most 16 MiB
BLOCK = 32  # values of a block of Q8_0, Q4_0 and MXFP4
# Bytes of a block. MXFP4 has an exponent, then codes; E2M1 and E8M0 are the codes and the exponents
# alone.
BLOCK_BYTES = {"F32": 128, "BF16": 64, "Q8_0": 34, "Q4_0": 18, "MXFP4": 17, "E2M1": 16, "E8M0": 32}
BLOCK_BYTES["NVFP4"] = 18  # half of a block of 64 values
SUPER_BLOCK = 256  # values of a block of the K-quants
SUPER_BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
# The mixtures of llama.cpp: the format of most matrices, and that of the matrices with more bits.
MIXTURES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K"), "Q6_K": ("Q6_K", "Q6_K")}
_COLUMNS_OF_MAMBA2 = ("recurrent.decay", "recurrent.skip")  # vectors that GGUF has as columns
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_STD = math.sqrt(sum(value * value for value in E2M1_MAGNITUDES) / 8)
INT8_STD = math.sqrt((127 * 128 * 255 / 3 + 127 * 127) / 256)  # -127..127, -127 twice
INT4_STD = math.sqrt(sum((code - 8) ** 2 for code in range(16)) / 16)
# The scales of K-quants are the upper half of their range: 32 to 63, and 64 to 127 in Q6_K.
K_SCALE_RMS = math.sqrt(sum(scale**2 for scale in range(32, 64)) / 32)
Q6_SCALE_RMS = math.sqrt(sum(scale**2 for scale in range(64, 128)) / 64)
EXPONENT_BIAS = 127
# The values of the E4M3 codes 0 to 0x7e.
E4M3_VALUES = np.array(
    [
        code * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10)
        for code in range(127)
    ]
)
LOGIT_STD, SMALL_STD = 2.0, 0.1


@dataclass(frozen=True)
class RandomTensor:
    """Name, shape in values (outermost first) and distribution of one tensor.

    E8M0 scales have the `std` of the matrix that they scale. `values` are those of an F32 vector
    that is not random.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    std: float
    mean: float = 0.0
    values: tuple[float, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes in the file."""
        values = math.prod(self.shape)
        if self.encoding in SUPER_BLOCK_BYTES:
            return values // SUPER_BLOCK * SUPER_BLOCK_BYTES[self.encoding]
        return values * BLOCK_BYTES[self.encoding] // BLOCK

    def pieces(self, seed: int) -> Iterator[Bytes]:
        """Yield the bytes in order, PIECE_VALUES values at a time."""
        if self.values is not None:
            yield np.array(self.values, np.float32).view(np.uint8)
            return
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        num_values = math.prod(self.shape)
        for start in range(0, num_values, PIECE_VALUES):
            count = min(PIECE_VALUES, num_values - start)
            if self.encoding in ("F32", "BF16"):
                yield self._levels()[random_bytes(rng, count)].view(np.uint8)
            elif self.encoding == "E2M1":
                yield random_bytes(rng, count // 2)
            elif self.encoding == "E8M0":
                yield self._exponents(rng, count)
            elif self.encoding in SUPER_BLOCK_BYTES:
                yield self._super_blocks(rng, count // SUPER_BLOCK).reshape(-1)
            else:
                yield self._blocks(rng, count // BLOCK).reshape(-1)

    def _levels(self) -> npt.NDArray[Any]:
        normal = statistics.NormalDist()
        quantiles = [normal.inv_cdf((i + 0.5) / 256) for i in range(256)]
        levels = np.array([self.mean + self.std * z for z in quantiles], np.float32)
        if self.encoding == "F32":
            return levels
        bits = levels.view(np.uint32)
        rounded: npt.NDArray[Any] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.astype(np.uint16)

    def _blocks(self, rng: np.random.Generator, count: int) -> Bytes:
        """Return blocks of a scale and codes, one block per row."""
        if self.encoding == "NVFP4":
            blocks = np.empty((count // 2, 36), np.uint8)
            blocks[:, :4] = self._e4m3_scales(rng, 2 * count).reshape(-1, 4)
            blocks[:, 4:] = random_bytes(rng, count * 16).reshape(-1, 32)
            return blocks
        blocks = np.empty((count, BLOCK_BYTES[self.encoding]), np.uint8)
        if self.encoding == "MXFP4":
            blocks[:, 0] = self._exponents(rng, count)
            blocks[:, 1:] = random_bytes(rng, count * 16).reshape(-1, 16)
        elif self.encoding == "Q8_0":
            blocks[:, :2] = np.array([self.std / INT8_STD], np.float16).view(np.uint8)
            codes = np.maximum(random_bytes(rng, count * 32).view(np.int8), -127)
            blocks[:, 2:] = codes.view(np.uint8).reshape(-1, 32)
        else:  # codes -8 to 7; every second scale is negative, so that the mean is zero
            scales = np.array([self.std / INT4_STD, -self.std / INT4_STD], np.float16)
            blocks[:, :2] = scales.view(np.uint8).reshape(2, 2)[np.arange(count) % 2]
            blocks[:, 2:] = random_bytes(rng, count * 16).reshape(-1, 16)
        return blocks

    def _super_blocks(self, rng: np.random.Generator, count: int) -> Bytes:
        """Return super-blocks with random codes and scales, one per row.

        In Q4_K and Q5_K, the minima equal the scales, and their factor is that of the mean code.
        Scales of Q6_K have random signs. The mean is thus zero.
        """
        size = SUPER_BLOCK_BYTES[self.encoding]
        blocks = random_bytes(rng, count * size).reshape(count, size)
        if self.encoding == "Q6_K":
            magnitudes = (blocks[:, 192:208] & 63 | 64).astype(np.int8)
            signed = np.where(blocks[:, 192:208] & 64, -magnitudes, magnitudes)
            blocks[:, 192:208] = signed.view(np.uint8)
            d = self.std / Q6_SCALE_RMS / math.sqrt((64**2 - 1) / 12 + 0.25)
            blocks[:, 208:] = np.array([d], np.float16).view(np.uint8)
            return blocks
        scales = random_bytes(rng, count * 8).reshape(count, 8) & 31 | 32
        blocks[:, 4:8] = blocks[:, 8:12] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
        blocks[:, 12:16] = (scales[:, 4:] & 15) * 0x11
        codes = 16 if self.encoding == "Q4_K" else 32
        d = self.std / K_SCALE_RMS / math.sqrt((codes**2 - 1) / 12)
        blocks[:, :4] = np.array([d, d * (codes - 1) / 2], np.float16).view(np.uint8)
        return blocks

    def _exponents(self, rng: np.random.Generator, count: int) -> Bytes:
        """Return two consecutive exponents, mixed so that the mean square is std²."""
        unit = math.log2(self.std / E2M1_STD)
        low = math.floor(unit)
        share_of_high = (4 ** (unit - low) - 1) / 3
        high = random_bytes(rng, count) < round(256 * share_of_high)
        return (low + EXPONENT_BIAS + high).astype(np.uint8)

    def _e4m3_scales(self, rng: np.random.Generator, count: int) -> Bytes:
        """Return two consecutive E4M3 codes, mixed so that the mean square is std²."""
        unit = self.std / E2M1_STD
        low = int(np.searchsorted(E4M3_VALUES, unit, side="right")) - 1
        below, above = (float(value) ** 2 for value in E4M3_VALUES[low : low + 2])
        high = random_bytes(rng, count) < round(256 * (unit**2 - below) / (above - below))
        return np.asarray(low + high, np.uint8)


def random_bytes(rng: np.random.Generator, count: int) -> Bytes:
    """Return `count` uniform bytes."""
    words = rng.integers(0, 1 << 64, -(-count // 8), np.uint64)
    return words.view(np.uint8)[:count]


@dataclass(frozen=True)
class Layout:
    """The tensors of a model in one file format.

    `matrices` is the encoding of most of them, or one of MIXTURES.
    """

    family: ModelFamily
    config: DecoderConfig
    biases: tuple[str, ...]  # the matrices of a dense layer that have one
    matrices: str = "BF16"
    more_tensors: TensorNames = field(default_factory=dict)  # of this config, in safetensors

    @property
    def is_gguf(self) -> bool:
        """Return whether the file is GGUF, where vectors and routers are F32."""
        return self.matrices != "BF16"

    def tensors(self) -> list[RandomTensor]:
        """Return all tensors of the file."""
        stored = self.family.gguf_tensors if self.is_gguf else self.family.hf_tensors
        if not self.is_gguf:
            stored = {**stored, **self.more_tensors}
        if recurrent := self.family.recurrent:
            own = recurrent.gguf_tensors if self.is_gguf else recurrent.hf_tensors
            stored = {**stored, **own}
        names = {kind: as_location(name) for kind, name in stored.items()}
        for matrix in self.biases:
            bias = names[matrix].name.removesuffix("weight") + "bias"
            names[f"{matrix}.bias"] = replace(names[matrix], name=bias)
        outer = {kind: names.pop(kind) for kind in ("embedding", "final_norm", "head")}
        if self.config.tied_head:
            del outer["head"]
        found = list(self._stored("embedding", outer.pop("embedding"), layer=0))
        for layer in range(self.config.num_layers):
            for kind, place in names.items():
                if is_in_layer(kind, self.config, layer=layer):
                    found += self._stored(kind, place, layer=layer)
            sparse = self.config.has_experts(layer)
            for kind, place in self._experts().items() if sparse else ():
                found += self._stored(kind, place, layer=layer)
        for kind, place in outer.items():
            found += self._stored(kind, place, layer=0)
        return found

    def _experts(self) -> Mapping[str, TensorLocation]:
        experts = self.family.experts
        assert experts is not None
        return (experts.gguf if self.is_gguf else experts.hf)[0]

    def _stored(self, kind: str, place: TensorLocation, *, layer: int) -> Iterator[RandomTensor]:
        """Yield the tensors that a file has for a name of the engine."""
        shapes = tensor_shapes(self.config)
        shape, std = shapes[kind], self._std(kind)
        mean = 1.0 if kind.endswith("norm") else 0.0
        if kind.endswith("_norm") and not self.is_gguf:
            mean -= self.family.hf_norm_offset
        if kind == "recurrent.decay":  # a half
            mean = -0.5 if self.is_gguf else math.log(0.5)
        if place.part:
            if place.part != place.fused[0]:
                return  # the first part stands for the stored matrix
            shape = (sum(shapes[part][0] for part in place.fused), *shape[1:])
        if place.half is not None:
            if place.half > 0:
                return  # as above
            shape = (2 * shape[0], *shape[1:])
        count = self.config.moe.num_experts if self.config.moe else 0
        if place.scales:
            rows, columns = shape
            if columns % BLOCK:
                raise ValueError(
                    f"{kind} has {columns} columns; MXFP4 needs a multiple of {BLOCK}."
                )
            blocks = (count, rows, columns // BLOCK)
            yield RandomTensor(place.name.format(i=layer), (*blocks, BLOCK), "E2M1", std)
            yield RandomTensor(place.scales.format(i=layer), blocks, "E8M0", std)
            return
        encoding = self._encoding(kind, shape, layer=layer)
        if self.is_gguf and shape[0] == 1:
            shape = shape[1:]
        rule = self.config.recurrent.rule if self.config.recurrent else ""
        if self.is_gguf and rule == "selective_scan" and kind in _COLUMNS_OF_MAMBA2:
            shape = (*shape, 1)
        if not self.is_gguf and kind == "recurrent.convolution":
            shape = (shape[0], 1, *shape[1:])
        shape = (count, *shape) if place.stacked else shape
        for expert in range(count if "{e}" in place.name else 1):
            name = place.name.format(i=layer, e=expert)
            yield RandomTensor(name, shape, encoding, std, mean)

    def _std(self, kind: str) -> float:
        if kind.endswith("norm"):
            return 0.0
        if kind in ("sinks", "recurrent.decay", "recurrent.dt_bias") or kind.endswith(".bias"):
            return SMALL_STD
        if kind == "embedding" and not self.config.tied_head:
            return 1.0
        deviation: float = tensor_shapes(self.config)[kind][-1] ** -0.5
        return deviation * (LOGIT_STD if kind in ("embedding", "head") else 1.0)

    def _encoding(self, kind: str, shape: tuple[int, ...], *, layer: int) -> str:
        if not self.is_gguf:
            return "BF16"
        if len(shape) < 2 or kind.endswith("router") or shape[-1] % BLOCK:
            return "F32"
        if kind.startswith("experts.") and has_mxfp4(self.family):
            return "MXFP4"
        if self.matrices not in MIXTURES:
            return self.matrices
        if shape[-1] % SUPER_BLOCK:
            raise ValueError(
                f"{kind} has {shape[-1]} columns; {self.matrices} needs a multiple of "
                f"{SUPER_BLOCK}."
            )
        usual, more = MIXTURES[self.matrices]
        return more if self._has_more_bits(kind, layer) else usual

    def _has_more_bits(self, kind: str, layer: int) -> bool:
        """Return whether llama.cpp's mixtures give a matrix more bits."""
        if kind == "head" or (kind == "embedding" and self.config.tied_head):
            return True
        if kind.removeprefix("experts.") not in ("v", "down"):
            return False
        count = self.config.num_layers
        first = count // 8
        return layer < first or layer >= 7 * count // 8 or (layer - first) % 3 == 2


def has_mxfp4(family: ModelFamily) -> bool:
    """Return whether the experts of a family are published in MXFP4."""
    places = family.experts.hf[0].values() if family.experts else ()
    return any(place.scales for place in places)

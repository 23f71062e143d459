"""Random tensors as bytes on the way to a file, one bounded piece after the other.

A value is `mean + std * z`; z is one of 256 quantiles of the normal distribution, or a random code
of the quantised formats with scales that give the same standard deviation. The bytes of a tensor
depend on the seed and its name alone, so that a shorter model has the first layers of a longer one.
"""

from __future__ import annotations

import enum
import math
import statistics
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PIECE_VALUES = 1 << 22  # values of one piece: no array of ours passes 16 MiB
BLOCK = 32  # values of a block of Q8_0, Q4_0 and MXFP4
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_STD = math.sqrt(sum(value * value for value in E2M1_MAGNITUDES) / 8)
INT8_STD = math.sqrt((127 * 128 * 255 / 3 + 127 * 127) / 256)  # -127..127, -127 twice
INT4_STD = math.sqrt(sum((code - 8) ** 2 for code in range(16)) / 16)
EXPONENT_BIAS = 127


class Encoding(enum.Enum):
    """What a tensor's bytes hold; the value is the number of bytes of BLOCK values."""

    F32 = "F32"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    MXFP4 = "MXFP4"  # blocks of 17 bytes: exponent, then codes
    E2M1_PAIRS = "E2M1_PAIRS"  # the codes alone: two values in a byte
    E8M0 = "E8M0"  # the exponents alone: one value in a byte

    def num_bytes(self, num_values: int) -> int:
        """Bytes of that many values."""
        per_block = {"F32": 128, "BF16": 64, "Q8_0": 34, "Q4_0": 18, "MXFP4": 17}
        per_block |= {"E2M1_PAIRS": 16, "E8M0": 32}
        return num_values * per_block[self.value] // BLOCK


@dataclass(frozen=True)
class RandomTensor:
    """Name, shape in values (outermost first) and distribution of one tensor.

    `std` of E8M0 is that of the matrix which the scales belong to. `values`: of an F32 vector that
    is not random.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    std: float
    mean: float = 0.0
    values: tuple[float, ...] | None = None

    @property
    def num_values(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.encoding.num_bytes(self.num_values)

    def pieces(self, seed: int) -> Iterator[Bytes]:
        """The bytes in order, PIECE_VALUES values at a time."""
        if self.values is not None:
            yield np.array(self.values, np.float32).view(np.uint8)
            return
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        make = {
            Encoding.F32: self._floats,
            Encoding.BF16: self._bfloats,
            Encoding.Q8_0: self._q8_0,
            Encoding.Q4_0: self._q4_0,
            Encoding.MXFP4: self._mxfp4,
            Encoding.E2M1_PAIRS: self._code_pairs,
            Encoding.E8M0: self._exponents,
        }[self.encoding]
        for start in range(0, self.num_values, PIECE_VALUES):
            yield make(rng, min(PIECE_VALUES, self.num_values - start))

    def _levels(self) -> npt.NDArray[np.float32]:
        normal = statistics.NormalDist()
        quantiles = [normal.inv_cdf((i + 0.5) / 256) for i in range(256)]
        return np.array([self.mean + self.std * z for z in quantiles], np.float32)

    def _floats(self, rng: np.random.Generator, count: int) -> Bytes:
        return self._levels()[random_bytes(rng, count)].view(np.uint8)

    def _bfloats(self, rng: np.random.Generator, count: int) -> Bytes:
        bits = self._levels().view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return rounded[random_bytes(rng, count)].view(np.uint8)

    def _q8_0(self, rng: np.random.Generator, count: int) -> Bytes:
        blocks = np.empty((count // BLOCK, 34), np.uint8)
        blocks[:, :2] = np.array([self.std / INT8_STD], np.float16).view(np.uint8)
        codes = random_bytes(rng, count).view(np.int8)
        blocks[:, 2:] = np.maximum(codes, -127).view(np.uint8).reshape(-1, BLOCK)
        return blocks.reshape(-1)

    def _q4_0(self, rng: np.random.Generator, count: int) -> Bytes:
        """Codes -8 to 7; every second scale is negative, so that the mean is zero."""
        blocks = np.empty((count // BLOCK, 18), np.uint8)
        scales = np.array([self.std / INT4_STD, -self.std / INT4_STD], np.float16)
        blocks[:, :2] = scales.view(np.uint8).reshape(2, 2)[np.arange(count // BLOCK) % 2]
        blocks[:, 2:] = random_bytes(rng, count // 2).reshape(-1, 16)
        return blocks.reshape(-1)

    def _mxfp4(self, rng: np.random.Generator, count: int) -> Bytes:
        blocks = np.empty((count // BLOCK, 17), np.uint8)
        blocks[:, 0] = self._exponents(rng, count // BLOCK)
        blocks[:, 1:] = random_bytes(rng, count // 2).reshape(-1, 16)
        return blocks.reshape(-1)

    def _code_pairs(self, rng: np.random.Generator, count: int) -> Bytes:
        return random_bytes(rng, count // 2)

    def _exponents(self, rng: np.random.Generator, count: int) -> Bytes:
        """Two neighbouring exponents, mixed so that the mean square is std²."""
        unit = math.log2(self.std / E2M1_STD)
        low = math.floor(unit)
        share_of_high = (4 ** (unit - low) - 1) / 3
        high = random_bytes(rng, count) < round(256 * share_of_high)
        return (low + EXPONENT_BIAS + high).astype(np.uint8)


def random_bytes(rng: np.random.Generator, count: int) -> Bytes:
    """[count] uniform bytes."""
    words = rng.integers(0, 1 << 64, -(-count // 8), np.uint64)
    return words.view(np.uint8)[:count]

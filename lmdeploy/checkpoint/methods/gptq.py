"""Read GPTQ's weights of 4 and 8 bits.

The layout is that of AutoGPTQ and GPTQModel. `qweight` [inputs · bits / 32, outputs] is int32, and
a word holds consecutive inputs. A word of `qzeros` [groups, outputs · bits / 32] holds consecutive
outputs. The lowest bits come first. `scales` are [groups, outputs], and `g_idx` [inputs] is the
group of each input. The format "gptq" stores zero - 1 modulo 2^bits, and "gptq_v2" the zero itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import release_pages
from lmdeploy.checkpoint.files.tensor_file import StoredTensor, TensorFile
from lmdeploy.checkpoint.methods.groups import (
    BLOCK,
    SCALE_FORMATS,
    Bytes,
    Floats,
    GroupMatrix,
    OrderWarning,
    float_columns,
    is_shuffled,
    unpack_words,
)
from lmdeploy.checkpoint.methods.matrix_file import MatrixFile, Parts
from lmdeploy.models.config_reader import ConfigReader

_CODES, _ZEROS, _SCALES, _GROUPS = "qweight", "qzeros", "scales", "g_idx"
_V2 = "gptq_v2"


@dataclass(frozen=True)
class _Layout:
    bits: int
    group: int  # inputs that share a scale; -1 means all
    zero_step: int  # what is added to a stored zero
    must_have_order: bool  # g_idx must exist
    has_sign: bool  # as in GroupMatrix
    warn_of_order: OrderWarning

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    def combine(self, parts: Parts) -> StoredTensor:
        """Return the matrix of the parts."""
        codes = parts.tensor(_CODES, formats=("I32",))
        words, rows = codes.shape
        cols = words * self.per_word
        group = cols if self.group == -1 else self.group
        if cols % group or cols % BLOCK:
            raise parts.refuse(
                codes,
                f"By {self.bits} bits it has {cols} inputs, which must be a multiple of "
                f"{group if cols % group else BLOCK}.",
            )
        groups = cols // group
        if rows % self.per_word:
            raise parts.refuse(codes, f"The outputs must be a multiple of {self.per_word}.")
        zeros = parts.tensor(_ZEROS, formats=("I32",), shape=(groups, rows // self.per_word))
        scales = parts.tensor(_SCALES, formats=SCALE_FORMATS, shape=(groups, rows))
        group_of = self._group_of(parts, cols, groups=groups)
        is_symmetric = self._is_symmetric(zeros)
        if self.bits == 8 and not is_symmetric:
            raise ModelFormatError(
                f"{parts.source}: tensor {zeros.name} has zero points of 8 bits. Every zero must "
                "be 128."
            )
        matrix = self._matrix(codes, scales, zeros=zeros, group_of=group_of)
        if is_symmetric:
            matrix = replace(matrix, zeros=None)
        name = "GPTQ" if self.zero_step else "GPTQ_V2"
        return StoredTensor(codes.name, name, (rows, cols), codes.raw, matrix=matrix)

    def _matrix(
        self,
        codes: StoredTensor,
        scales: StoredTensor,
        *,
        zeros: StoredTensor,
        group_of: StoredTensor | None,
    ) -> GroupMatrix:
        rows = codes.shape[1]
        mask = np.uint8((1 << self.bits) - 1)

        def read_codes(begin: int, end: int) -> Bytes:
            words = codes.raw.view("<u4").reshape(-1, rows)[:, begin:end]
            return unpack_words(words.T, self.bits)

        def read_zeros(begin: int, end: int) -> Floats:
            words = zeros.raw.view("<u4").reshape(zeros.shape)
            words = words[:, begin // self.per_word : -(-end // self.per_word)]
            stored = unpack_words(words, self.bits).T
            return ((stored + np.uint8(self.zero_step)) & mask).astype(np.float32)

        def read_scales(begin: int, end: int) -> Floats:
            return float_columns(scales.raw, scales.format, rows=rows, span=(begin, end))

        parts = [codes.raw, scales.raw, zeros.raw]
        return GroupMatrix(
            rows=rows,
            parts=tuple(parts if group_of is None else [*parts, group_of.raw]),
            codes=read_codes,
            scales=read_scales,
            zeros=read_zeros,
            bits=self.bits,
            row_step=self.per_word,
            group_of=None if group_of is None else group_of.raw.view("<i4").astype(np.int32),
            has_sign=self.has_sign,
        )

    def _is_symmetric(self, zeros: StoredTensor) -> bool:
        middle = (1 << (self.bits - 1)) - self.zero_step
        byte = middle if self.bits == 8 else middle * 0x11
        result = bool((zeros.raw == byte).all())
        release_pages(zeros.raw)
        return result

    def _group_of(self, parts: Parts, cols: int, *, groups: int) -> StoredTensor | None:
        """Return g_idx, or None if it follows from the order of the inputs."""
        if not self.must_have_order and not parts.has(_GROUPS):
            return None
        stored = parts.tensor(_GROUPS, formats=("I32",), shape=(cols,))
        if not is_shuffled(stored, parts.source, groups=groups):
            return None
        self.warn_of_order(stored.name)
        return stored


def gptq_parts(
    codes: Bytes, *, scales: Floats, zeros: Bytes
) -> dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float16]]:
    """Return the tensors of a matrix of 4 bits by suffix, in the format "gptq".

    `codes` are [outputs, inputs], `scales` and `zeros` [outputs, groups]. The numbers of outputs
    and inputs are multiples of 8. The groups follow the order of the inputs.
    """
    cols, groups = codes.shape[1], scales.shape[1]
    return {
        _CODES: np.ascontiguousarray(_pack_nibbles(codes).T),
        _ZEROS: _pack_nibbles(np.ascontiguousarray(((zeros - np.uint8(1)) & np.uint8(15)).T)),
        _SCALES: np.ascontiguousarray(scales.T.astype(np.float16)),
        _GROUPS: (np.arange(cols) // (cols // groups)).astype(np.int32),
    }


def _pack_nibbles(codes: Bytes) -> npt.NDArray[np.int32]:
    """Pack [n, m] codes of 4 bits to words [n, m / 8]. The lowest bits come first."""
    pairs = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    return np.ascontiguousarray(pairs).view("<i4").astype(np.int32)


def open_gptq(
    file: TensorFile, quantization: ConfigReader, *, source: str, has_sign: bool = False
) -> TensorFile:
    """Open GPTQ weights, whose scales may be negative if `has_sign`.

    Raise ModelFormatError for a variant that is not supported.
    """
    layout = _layout(quantization, source, has_sign=has_sign)
    return MatrixFile(
        file,
        marks=(_CODES,),
        others=(_ZEROS, _SCALES, _GROUPS),
        combine=layout.combine,
        source=source,
    )


def _layout(quantization: ConfigReader, source: str, *, has_sign: bool) -> _Layout:
    bits = quantization.integer("bits")
    if bits not in (4, 8):
        raise quantization.refuse(f"bits is {bits}. It must be 4 or 8.")
    group = quantization.integer("group_size", default=128, low=-1)
    if group != -1 and (group == 0 or group % BLOCK):
        raise quantization.refuse(f"group_size is {group}. It must be -1 or a multiple of {BLOCK}.")
    if (rules := quantization.child("dynamic")) is not None:
        _check_dynamic(rules)
    if quantization.flag("is_marlin_format", default=False):
        raise quantization.refuse("is_marlin_format is true. It must be false.")
    packing = quantization.text("checkpoint_format", default="gptq")
    if packing not in ("gptq", _V2):
        raise quantization.refuse(
            f"checkpoint_format is {packing[:40]!r}. It must be gptq or {_V2}."
        )
    return _Layout(
        bits=bits,
        group=group,
        zero_step=int(packing != _V2),
        must_have_order=quantization.flag("desc_act", default=False),
        has_sign=has_sign,
        warn_of_order=OrderWarning(source),
    )


def _check_dynamic(rules: ConfigReader) -> None:
    """Raise ModelFormatError if a rule for single modules has settings of its own.

    A rule that starts with "-:" excludes modules, as the tensors show.
    """
    for rule in sorted(rules.keys()):
        if not rule.startswith("-:") and rules.child(rule) is not None:
            raise rules.refuse(
                f"The rule {rule[:40]!r} has settings for single modules. It must have none."
            )

"""Plan the tensors to load: look up each one and compare its shape with the config."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import release_pages
from lmdeploy.checkpoint.files.tensor_file import (
    PLAIN_FORMATS,
    SPLIT_MXFP4,
    SUPPORTED_FORMATS,
    StoredTensor,
    TensorFile,
)
from lmdeploy.checkpoint.files.turned_matrix import TurnedMatrix
from lmdeploy.checkpoint.kv_scales import KvScales
from lmdeploy.models.decoder_config import DecoderConfig
from lmdeploy.models.experts import (
    ExpertTensors,
    TensorLocation,
    VectorRule,
)
from lmdeploy.models.family import (
    FFN_MATRICES,
    HEAD_MATRICES,
    JOINT_HEADS,
    ModelFamily,
    TensorNames,
)
from lmdeploy.models.tensor_shapes import shape_in_layer, tensor_shapes

logger = logging.getLogger("lmdeploy")

GGUF_ROPE_FACTORS = "rope_freqs.weight"
GGUF_LONGROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
# Ignored tensors: tables in older checkpoints that follow from the config.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
# Scales of a quantized KV cache, as written by llm-compressor, ModelOpt and Quark.
_KV_SCALE_SUFFIXES = (
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".k_zero_point",
    ".v_zero_point",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
KV_SCALES_ADVICE = (
    "To calibrate the cache, run `lmdeploy lite calibrate` and use --kv-quality best "
    "--kv-calibration FILE."
)
_OUTER_BIASES = ("final_norm.bias", "head.bias")
_OUTER_PER_LAYER = ("per_layer_embedding", "per_layer_projection", "per_layer_norm")
_PER_LAYER = ("per_layer_gate", "per_layer_up", "per_layer_output_norm")
_END_BYTES = 4096
_COMPARED_BYTES = 16 << 20  # per step
_MAX_STACKED = 16  # one layer has fewer


@dataclass(frozen=True)
class TensorLayout:
    """Names and layout of the tensors of a family in one kind of file."""

    names: TensorNames  # in layers with attention and without experts, and outside the layers
    experts: tuple[ExpertTensors, ...]  # alternatives, for layers with experts
    recurrent: TensorNames  # of recurrent layers
    interleaved_rope: bool
    scales: Mapping[str, float] = field(default_factory=dict)  # factors of stored values
    norm_offset: float = 0.0  # added to every norm weight
    unused: tuple[str, ...] = ()  # patterns of names that are ignored


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to load: the engine's name, the stored bytes and the layout of its rows."""

    name: str
    tensor: StoredTensor  # one or two dimensions
    interleaved_heads: int = 0  # number of heads whose rows are interleaved for RoPE, or 0
    interleaved_rows: int = 0  # the rows of each head that are interleaved; 0 means all
    offset: float = 0.0  # added to the values of a vector
    transposed: bool = False  # stored as [inputs, outputs]
    convert: VectorRule | None = None  # makes a vector of the stored values
    scale: float = 1.0  # factor of the values
    mapped: bool = False  # MXFP4 that the engine reads from the mapped file

    @property
    def is_vector(self) -> bool:
        """Return whether the engine has the tensor as an FP32 vector."""
        return len(self.tensor.shape) == 1 or self.convert is not None

    @property
    def is_expert(self) -> bool:
        """Return whether the tensor belongs to an expert."""
        return ".experts." in self.name

    @property
    def rows(self) -> int:
        """Return the number of outputs of the engine's matrix."""
        return self.tensor.cols if self.transposed else self.tensor.rows

    @property
    def cols(self) -> int:
        """Return the number of inputs of the engine's matrix."""
        return self.tensor.rows if self.transposed else self.tensor.cols


@dataclass(frozen=True)
class Checkpoint:
    """A checked model: everything that model_files.py needs to feed the engine."""

    path: Path
    family: ModelFamily
    config: DecoderConfig
    tensors: tuple[PlannedTensor, ...]
    stored_dtype: str  # of most values without experts: bfloat16, float16, float32 or quantized
    metadata: Mapping[str, Any]  # config.json, or GGUF's key-value pairs
    is_gguf: bool
    kv_scales: KvScales | None = None  # of an FP8 cache


def resolve_tied_head(
    file: TensorFile, config: DecoderConfig, *, names: TensorNames, source: str
) -> DecoderConfig:
    """Return the config, untied if the file has a head that differs from the embedding.

    As in transformers, stored tensors have priority over tie_word_embeddings.
    """
    place = as_location(names["head"])
    if not config.tied_head or place.name not in file.names:
        return config
    lookup = _Lookup(file, config, source=source)
    embedding = lookup.find("embedding", as_location(names["embedding"]))
    head = lookup.find("head", place)
    if _is_same(embedding, head):
        return config
    logger.warning(
        "%s: tie_word_embeddings is true, but %s differs from %s. Both are loaded.",
        source,
        head.name,
        embedding.name,
    )
    return replace(config, tied_head=False)


def _is_same(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors of one shape have the same bytes.

    Both ends are compared first, because they differ in most cases.
    """
    if one.format != other.format or one.raw.size != other.raw.size:
        return False
    size = one.raw.size
    pieces = [slice(0, _END_BYTES), slice(max(size - _END_BYTES, 0), size)]
    pieces += [slice(at, at + _COMPARED_BYTES) for at in range(0, size, _COMPARED_BYTES)]
    for piece in pieces:
        equal = np.array_equal(one.raw[piece], other.raw[piece])
        release_pages(one.raw[piece])
        release_pages(other.raw[piece])
        if not equal:
            return False
    return True


def plan_tensors(
    file: TensorFile,
    config: DecoderConfig,
    *,
    layout: TensorLayout,
    source: str,
) -> Iterator[PlannedTensor]:
    """Yield every tensor to load, in order. Reject missing, misshapen and unknown tensors."""
    lookup = _Lookup(file, config, unused=layout.unused, source=source)
    places = {
        kind: as_location(name) for kind, name in {**layout.names, **layout.recurrent}.items()
    }
    outer = [
        kind
        for kind in ("embedding", "final_norm", "head")
        if kind != "head" or not config.tied_head
    ]
    optional = (*_OUTER_BIASES, *(_OUTER_PER_LAYER if config.structure.per_layer_size else ()))
    outer += [kind for kind in optional if kind in places]
    if config.tied_head:
        lookup.ignore(places["head"].name)

    def planned(kind: str, *, layer: int | None = None) -> PlannedTensor:
        name = kind if layer is None else f"layers.{layer}.{kind}"
        place = places[_stored_kind(kind, config, layer=layer)]
        tensor = lookup.find(kind, place, layer=layer or 0)
        offset = layout.norm_offset if kind.endswith("_norm") else 0.0
        heads = _interleaved_heads(kind, config) if layout.interleaved_rope else 0
        mapped = heads == 0 and tensor.runs is None and _is_mxfp4(tensor)
        planned = PlannedTensor(
            name, tensor, heads, config.rope.dim, offset, convert=place.convert, mapped=mapped
        )
        return _scaled(planned, layout.scales.get(kind, 1.0), source=source)

    for kind in outer:
        yield planned(kind)
    of_heads = [kind for kind in places if kind in HEAD_MATRICES]
    expert_places = _choose(layout.experts, file=file, config=config)
    for layer in range(config.num_layers):
        for kind in places:
            if kind not in of_heads and is_in_layer(kind, config, layer=layer):
                yield planned(kind, layer=layer)
        for kind in of_heads:
            yield from _plan_heads(lookup, kind, place=places[kind], layer=layer)
        if config.has_experts(layer):
            yield from _plan_experts(lookup, expert_places, layer=layer)
    lookup.refuse_unknown()


def is_in_layer(kind: str, config: DecoderConfig, *, layer: int) -> bool:
    """Return whether a layer has the tensor `kind` of TensorLayout.names or `recurrent`."""
    base = kind.removesuffix(".bias")
    if base in ("embedding", "final_norm", "head", *_OUTER_PER_LAYER):
        return False
    if base in _PER_LAYER:
        return config.structure.per_layer_size > 0
    if base in ("k", "v", "k_norm"):
        return config.owns_kv(layer)
    has_attention, is_recurrent = config.has_attention(layer), config.is_recurrent(layer)
    if base in FFN_MATRICES:
        return config.has_dense_feed_forward(layer)
    if base in ("ffn_norm", "ffn_output_norm"):
        return config.has_feed_forward(layer)
    if base in ("attention_norm", "attention_output_norm"):
        return has_attention or is_recurrent
    return is_recurrent if base.startswith("recurrent.") else has_attention


def _stored_kind(kind: str, config: DecoderConfig, *, layer: int | None) -> str:
    """Return the kind of tensor that a file has for `kind`: that of K if it is also V."""
    v_is_k = config.layer_sizes.v_is_k
    if layer is None or not v_is_k or not v_is_k[layer] or kind not in ("v", "v.bias"):
        return kind
    return kind.replace("v", "k")


def _scaled(planned: PlannedTensor, scale: float, *, source: str) -> PlannedTensor:
    """Return the tensor with a factor. Raise ModelFormatError if it is quantized."""
    if scale != 1.0 and planned.tensor.format not in PLAIN_FORMATS:
        raise ModelFormatError(
            f"{source}: tensor {planned.tensor.name} is quantized, but config.json has a factor of "
            f"{scale:g} for it. It must be F32, F16 or BF16."
        )
    return replace(planned, scale=scale)


def as_location(name: str | TensorLocation) -> TensorLocation:
    """Return the location of a whole tensor if `name` is text, else `name`."""
    return TensorLocation(name) if isinstance(name, str) else name


def bias_of(matrix: str | TensorLocation) -> TensorLocation:
    """Return the location of a matrix's bias."""
    place = as_location(matrix)
    return replace(place, name=place.name.removesuffix("weight") + "bias", convert=None)


def _interleaved_heads(kind: str, config: DecoderConfig) -> int:
    """Return the number of heads in the rows of a tensor that RoPE rotates, or 0."""
    base = kind.removesuffix(".bias")
    if base in ("q_norm", "k_norm") and not config.structure.norm.qk_all_heads:
        return 1
    return {"q": config.num_heads, "k": config.num_kv_heads}.get(base.removesuffix("_norm"), 0)


def _plan_heads(
    lookup: _Lookup, kind: str, *, place: TensorLocation, layer: int
) -> Iterator[PlannedTensor]:
    """Yield the matrices of a layer's heads that multiply queries and sums of latents.

    The stored matrix `latent.kv_b` makes the keys and the values of all heads from a latent. A
    query multiplies a head's keys, so that part is transposed.
    """
    config, name = lookup.config, f"layers.{layer}"
    assert config.latent is not None
    keys, values = config.latent.nope_dim, config.latent.value_dim
    if kind != JOINT_HEADS:
        for head in range(config.num_heads):
            tensor = lookup.find(kind, place, layer=layer, expert=head)
            yield PlannedTensor(f"{name}.{kind}.{head}", tensor)
        return
    both = lookup.find(kind, place, layer=layer)
    for head in range(config.num_heads):
        first = head * (keys + values)
        yield turned_matrix(f"{name}.latent.k_b.{head}", both.take(first, keys))
        yield PlannedTensor(f"{name}.latent.v_b.{head}", both.take(first + keys, values))


def turned_matrix(name: str, tensor: StoredTensor) -> PlannedTensor:
    """Return the transposed matrix. Blocks of quantized rows cannot be transposed as they are."""
    if tensor.format in PLAIN_FORMATS:
        return PlannedTensor(name, tensor, transposed=True)
    matrix = TurnedMatrix(tensor)
    turned = replace(
        tensor, format=f"{tensor.format} TURNED", shape=tensor.shape[::-1], matrix=matrix, runs=None
    )
    return PlannedTensor(name, turned)


def _plan_experts(lookup: _Lookup, places: ExpertTensors, *, layer: int) -> Iterator[PlannedTensor]:
    """Yield the router and the shared expert of a layer, and then its experts in order."""
    moe = lookup.config.moe
    assert moe is not None
    of_layer = [kind for kind in places if not kind.startswith("experts.")]
    for kind in of_layer:
        tensor = lookup.find(kind, places[kind], layer=layer)
        yield PlannedTensor(f"layers.{layer}.{kind}", tensor, convert=places[kind].convert)
    of_expert = [kind for kind in places if kind.startswith("experts.")]
    for expert in range(moe.num_experts):
        for kind in of_expert:
            place = places[kind]
            tensor = lookup.find(kind, place, layer=layer, expert=expert)
            yield PlannedTensor(
                f"layers.{layer}.experts.{expert}.{kind.removeprefix('experts.')}",
                tensor,
                transposed=place.transposed,
                mapped=_is_mxfp4(tensor),
            )


def _count_stacked(kind: str, config: DecoderConfig) -> int:
    """Return the items of a tensor with one for each head, or for each expert."""
    if kind in HEAD_MATRICES:
        return config.num_heads
    assert config.moe is not None
    return config.moe.num_experts


def _is_mxfp4(tensor: StoredTensor) -> bool:
    return tensor.format in ("MXFP4", SPLIT_MXFP4) and len(tensor.shape) == 2


def _choose(
    alternatives: tuple[ExpertTensors, ...], *, file: TensorFile, config: DecoderConfig
) -> ExpertTensors:
    """Return the alternative of which the file has the most tensors."""
    if config.moe is None or True not in config.moe.layers:
        return {}
    layer, present = config.moe.layers.index(True), set(file.names)

    def found(places: ExpertTensors) -> int:
        return sum(place.name.format(i=layer, e=0) in present for place in places.values())

    return max(alternatives, key=found)


class _Lookup:
    """Finds tensors by name, checks their shapes, and keeps the names that were not requested."""

    def __init__(
        self,
        file: TensorFile,
        config: DecoderConfig,
        *,
        unused: tuple[str, ...] = (),
        source: str,
    ) -> None:
        self.config = config
        self._file = file
        self._source = source
        self._names = set(file.names)
        self._left = {name for name in file.names if not name.endswith(_IGNORED_SUFFIXES)}
        if unused:
            pattern = re.compile("|".join(unused))
            self._left = {name for name in self._left if not pattern.fullmatch(name)}
        self._left -= {GGUF_ROPE_FACTORS, *GGUF_LONGROPE_FACTORS}
        self._shapes = tensor_shapes(config)
        self._stacked: dict[str, StoredTensor] = {}  # tensors of the current layer

    def find(
        self, kind: str, place: TensorLocation, *, layer: int = 0, expert: int = 0
    ) -> StoredTensor:
        """Return the tensor of an engine name. `expert` selects an item of a stacked tensor."""
        name = place.name.format(i=layer, e=expert)
        shape = shape_in_layer(kind, self.config, layer=layer, shapes=self._shapes)
        if place.grouped and self.config.recurrent is not None:
            groups = self.config.recurrent.norm_groups
            shape = (groups, shape[0] // groups)
        if place.scales:
            return self._split(kind, place, layer=layer, expert=expert)
        shape = shape[::-1] if place.transposed else shape
        count = shape[0]
        if place.half is not None:
            shape = (count, 2 * shape[1]) if place.transposed else (2 * count, *shape[1:])
        if place.part:
            shape = (sum(self._shapes[name][0] for name in place.fused), *shape[1:])
        if not place.stacked:  # a convolution has a dimension for the inputs of a channel
            tensor = self._stored(name, shape, max_dims=2 if place.convert is None else 3)
        else:
            count_stacked = _count_stacked(kind, self.config)
            tensor = self._stack(name, shape, count=count_stacked).item(expert)
        if place.half is not None and place.transposed:
            halves = replace(tensor, shape=(2 * count, shape[1] // 2))  # two for each row
            tensor = halves.take(place.half, 1, groups=count)
        elif place.half is not None:
            tensor = tensor.take(place.half * count, count)
        return self._take_part(tensor, place) if place.part else tensor

    def _take_part(self, tensor: StoredTensor, place: TensorLocation) -> StoredTensor:
        config = self.config
        groups = {
            "": 1,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "key_heads": config.recurrent.num_key_heads if config.recurrent else 1,
        }[place.heads]
        rows = [self._shapes[name][0] // groups for name in place.fused]
        index = place.fused.index(place.part)
        return tensor.take(sum(rows[:index]), rows[index], groups=groups)

    def ignore(self, name: str) -> None:
        """Allow the file to have this tensor without loading it."""
        self._left.discard(name)

    def refuse_unknown(self) -> None:
        """Raise ModelFormatError if the file has tensors that were not requested.

        AutoGPTQ writes a bias of zeros for every matrix, which changes nothing.
        """
        self._left = {name for name in self._left if not self._is_zero_bias(name)}
        if scales := [name for name in self._left if name.endswith(_KV_SCALE_SUFFIXES)]:
            raise ModelFormatError(
                f"{self._source}: {len(scales)} of the tensors are KV scales, such as "
                f"{min(scales)[:80]}. Remove them. {KV_SCALES_ADVICE}"
            )
        if self._left:
            raise ModelFormatError(
                f"{self._source}: The architecture does not use {len(self._left)} of the tensors, "
                f"such as {min(self._left)[:80]}."
            )

    def _is_zero_bias(self, name: str) -> bool:
        if not name.endswith(".bias"):
            return False
        tensor = self._file.tensor(name)
        return len(tensor.shape) == 1 and not tensor.raw.any()

    def _split(self, kind: str, place: TensorLocation, *, layer: int, expert: int) -> StoredTensor:
        rows, cols = self._shapes[kind]
        if cols % 32:
            raise ModelFormatError(
                f"{self._source}: tensor {place.name.format(i=layer)} has {cols} inputs in the "
                "config. Their number must be a multiple of 32."
            )
        names = [name.format(i=layer) for name in (place.name, place.scales)]
        shapes = ((rows, cols // 32, 16), (rows, cols // 32))
        codes, scales = (
            self._stack(name, shape, count=_count_stacked(kind, self.config), formats=("U8",)).item(
                expert
            )
            for name, shape in zip(names, shapes, strict=True)
        )
        return StoredTensor(codes.name, SPLIT_MXFP4, (rows, cols), codes.raw, scales.raw)

    def _stack(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        count: int,
        formats: tuple[str, ...] = SUPPORTED_FORMATS,
    ) -> StoredTensor:
        if name not in self._stacked:
            whole = (count, *shape)
            if len(self._stacked) > _MAX_STACKED:
                self._stacked.clear()
            self._stacked[name] = self._stored(name, whole, formats=formats)
        return self._stacked[name]

    def _stored(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        max_dims: int = 2,
        formats: tuple[str, ...] = SUPPORTED_FORMATS,
    ) -> StoredTensor:
        if name not in self._names:
            raise ModelFormatError(f"{self._source}: tensor {name} is missing.")
        self._left.discard(name)
        tensor = self._file.tensor(name, max_dims=max(max_dims, len(shape)), formats=formats)
        # GGUF drops the dimension of a single row.
        if [size for size in tensor.shape if size != 1] == [size for size in shape if size != 1]:
            return replace(tensor, shape=shape)
        if tensor.shape != shape:
            raise ModelFormatError(
                f"{self._source}: tensor {name} has shape {list(tensor.shape)}. By the config it "
                f"must be {list(shape)}."
            )
        return tensor


def stored_dtype(tensors: tuple[PlannedTensor, ...]) -> str:
    """Return the type of most matrix values. MXFP4 experts do not count."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    values: dict[str, int] = {}
    for planned in tensors:
        if not planned.is_vector and not (planned.mapped and planned.is_expert):
            kind = names.get(planned.tensor.format, "quantized")
            values[kind] = values.get(kind, 0) + planned.tensor.rows * planned.tensor.cols
    return max(values, key=lambda kind: values[kind])

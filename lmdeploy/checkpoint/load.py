"""Tensors of a checkpoint → the engine's weights: packed, or mapped from the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from lmdeploy.base.files import prefetch_pages, release_pages
from lmdeploy.checkpoint.convert import (
    MAPPED_FORMATS,
    engine_bytes,
    engine_format,
    is_router,
    matrix_for_engine,
    vector_for_engine,
)
from lmdeploy.checkpoint.fingerprint import FileIdentities
from lmdeploy.checkpoint.open import Checkpoint
from lmdeploy.checkpoint.tensor_plan import PlannedTensor
from lmdeploy.checkpoint.weight_cache import (
    WeightCacheEntry,
    WeightCacheWriter,
    options_from_environment,
)
from lmdeploy.checkpoint.weight_cache_file import Shape

if TYPE_CHECKING:
    from lmdeploy._turbomind import Weights, WeightsBuilder

# Below this, packing takes no time that anybody would notice.
MIN_CACHED_BYTES = 16 << 20
# A larger tensor is not converted while another one waits: two of them would be in memory.
_MAX_AHEAD_BYTES = 256 << 20
_VECTOR = "vector"


@dataclass(frozen=True)
class LoadedWeights:
    """The weights, and what was mapped or is to be written for them."""

    weights: Weights
    mapped_bytes: int = 0  # of packed weights that are used in the cache's file
    cache_writer: WeightCacheWriter | None = None


@dataclass(frozen=True)
class _Converted:
    planned: PlannedTensor
    kind: str  # of the engine's formats, or _VECTOR
    values: npt.NDArray[Any]


def cache_of(checkpoint: Checkpoint, files: FileIdentities) -> WeightCacheEntry | None:
    """Where the packed weights are kept; None: nowhere. Not for exact compute.

    Raises ValueError for wrong options in the environment.
    """
    options = options_from_environment()
    shapes = _packed_shapes(checkpoint)
    if options is None or sum(shape.num_bytes for shape in shapes.values()) < MIN_CACHED_BYTES:
        return None
    return WeightCacheEntry(options, checkpoint, shapes=shapes, files=files)


def load_weights(
    builder: WeightsBuilder, checkpoint: Checkpoint, *, exact: bool, copied: bool, progress: bool
) -> LoadedWeights:
    """Every tensor of the checkpoint, converted and packed. `copied`: none stays where it lies."""
    title = _title(checkpoint, progress)
    _add_all(builder, checkpoint.tensors, exact=exact, copied=copied, progress=title)
    return LoadedWeights(builder.build())


def load_through_cache(
    builder: WeightsBuilder, checkpoint: Checkpoint, *, entry: WeightCacheEntry, progress: bool
) -> LoadedWeights:
    """The same from the cache; where it has none, with a writer that puts them there."""
    cached = entry.load()
    if cached is None:
        title = _title(checkpoint, progress)
        _add_all(builder, checkpoint.tensors, exact=False, copied=False, progress=title)
        packed = builder.packed()
        matrices = {name: packed[name][3] for name in entry.shapes}
        return LoadedWeights(builder.build(), cache_writer=WeightCacheWriter(entry, matrices))
    in_place = cached.in_huge_pages
    for name, data in cached.matrices.items():
        shape = entry.shapes[name]
        builder.add_packed(name, shape.format, data, shape.rows, shape.cols, in_place=in_place)
        if not in_place:
            release_pages(data)
    rest = [planned for planned in checkpoint.tensors if planned.name not in cached.matrices]
    _add_all(builder, rest, exact=False, copied=False, progress="")
    total = sum(shape.num_bytes for shape in entry.shapes.values())
    return LoadedWeights(builder.build(), mapped_bytes=total if in_place else 0)


def _packed_shapes(checkpoint: Checkpoint) -> Mapping[str, Shape]:
    """Every matrix that the engine packs, as it will be packed, in the order of the plan."""
    from lmdeploy._turbomind import packed_bytes

    shapes = {}
    for planned in checkpoint.tensors:
        if not planned.mapped and len(planned.tensor.shape) > 1:
            kind = "f32" if is_router(planned) else engine_format(planned.tensor, exact=False)
            size = packed_bytes(kind, planned.rows, planned.cols)
            shapes[planned.name] = Shape(kind, planned.rows, planned.cols, size)
    return shapes


def _title(checkpoint: Checkpoint, progress: bool) -> str:
    return f"Loading {checkpoint.path.name}" if progress else ""


def _add_all(
    builder: WeightsBuilder,
    tensors: Sequence[PlannedTensor],
    *,
    exact: bool,
    copied: bool,
    progress: str,
) -> None:
    # `progress` is the title of a bar; empty: none, and nothing is imported for it.
    if not progress:
        for converted in _convert_all(tensors, exact=exact):
            _add(builder, converted, copied=copied)
        return
    from tqdm import tqdm

    bar = tqdm(
        total=sum(planned.tensor.num_bytes for planned in tensors),
        desc=progress,
        unit="B",
        unit_scale=True,
    )
    with bar:
        for converted in _convert_all(tensors, exact=exact):
            _add(builder, converted, copied=copied)
            bar.update(converted.planned.tensor.num_bytes)


def _convert_all(tensors: Sequence[PlannedTensor], *, exact: bool) -> Iterator[_Converted]:
    """Each tensor in order; the next one is read and converted while the caller packs this one."""
    with ThreadPoolExecutor(1, "tm-convert") as thread:
        ahead = None
        for index, planned in enumerate(tensors):
            ready = _convert(planned, exact=exact) if ahead is None else ahead.result()
            ahead = None
            following = tensors[index + 1 : index + 2]
            if following and engine_bytes(following[0], exact) <= _MAX_AHEAD_BYTES:
                ahead = thread.submit(_convert, following[0], exact=exact)
            yield ready


def _convert(planned: PlannedTensor, *, exact: bool) -> _Converted:
    tensor = planned.tensor
    if planned.mapped:
        return _Converted(planned, MAPPED_FORMATS[tensor.format], tensor.raw)
    prefetch_pages(tensor.raw)
    heads = planned.interleaved_heads
    if len(tensor.shape) == 1:
        return _Converted(planned, _VECTOR, vector_for_engine(tensor, interleaved_heads=heads))
    kind, values = matrix_for_engine(
        tensor,
        exact=exact or is_router(planned),
        interleaved_heads=heads,
        transposed=planned.transposed,
    )
    return _Converted(planned, kind, values)


def _add(builder: WeightsBuilder, converted: _Converted, *, copied: bool) -> None:
    planned, tensor = converted.planned, converted.planned.tensor
    if converted.kind == _VECTOR:
        builder.add_vector(planned.name, converted.values)
    else:
        builder.add_matrix(
            planned.name,
            converted.kind,
            converted.values,
            planned.rows,
            planned.cols,
            tensor.scales if planned.mapped else None,
        )
    if planned.mapped and not copied:
        return
    for part in tensor.parts:
        release_pages(part)

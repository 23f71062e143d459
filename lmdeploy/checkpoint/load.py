"""Load the tensors of a checkpoint into the engine: pack them, or map them from the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import Bytes, prefetch_pages, release_pages
from lmdeploy.checkpoint.convert import (
    MAPPED_FORMATS,
    check_exponents,
    engine_bytes,
    engine_format,
    is_router,
    matrix_for_engine,
    scales_for_engine,
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

# Packing less than this takes negligible time.
MIN_CACHED_BYTES = 16 << 20
# A larger tensor is not converted ahead, so that memory holds only one of them.
_MAX_AHEAD_BYTES = 256 << 20
_VECTOR = "vector"


@dataclass(frozen=True)
class LoadedWeights:
    """The weights, and their use of the weight cache."""

    weights: Weights
    mapped_bytes: int = 0  # packed weights that the engine reads from the mapped cache file
    cache_writer: WeightCacheWriter | None = None


@dataclass(frozen=True)
class _Converted:
    planned: PlannedTensor
    kind: str  # an engine format or _VECTOR
    values: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None = None


def cache_of(checkpoint: Checkpoint, files: FileIdentities) -> WeightCacheEntry | None:
    """Return the cache entry of the packed weights, or None if they are not cached.

    Exact compute does not use the cache. Raise ValueError for wrong environment variables.
    """
    options = options_from_environment()
    shapes = _packed_shapes(checkpoint)
    if options is None or sum(shape.num_bytes for shape in shapes.values()) < MIN_CACHED_BYTES:
        return None
    return WeightCacheEntry(options, checkpoint, shapes=shapes, files=files)


def load_weights(
    builder: WeightsBuilder, checkpoint: Checkpoint, *, exact: bool, copied: bool, progress: bool
) -> LoadedWeights:
    """Convert and pack every tensor of the checkpoint.

    `copied` means that the engine copies all tensors, so no page of the file stays in use.
    """
    title = _title(checkpoint, progress)
    _add_all(builder, checkpoint.tensors, exact=exact, copied=copied, progress=title)
    return LoadedWeights(builder.build())


def load_through_cache(
    builder: WeightsBuilder, checkpoint: Checkpoint, *, entry: WeightCacheEntry, progress: bool
) -> LoadedWeights:
    """Load the weights from the cache, or pack them and return a writer for the cache."""
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
    _check_files(cached.matrices.values())
    rest = [planned for planned in checkpoint.tensors if planned.name not in cached.matrices]
    _add_all(builder, rest, exact=False, copied=False, progress="")
    total = sum(shape.num_bytes for shape in entry.shapes.values())
    return LoadedWeights(builder.build(), mapped_bytes=total if in_place else 0)


def _packed_shapes(checkpoint: Checkpoint) -> Mapping[str, Shape]:
    """Return the packed shape of every matrix that the engine packs, in the order of the plan."""
    from lmdeploy._turbomind import packed_bytes

    shapes = {}
    for planned in checkpoint.tensors:
        if planned.is_vector:
            continue
        kind = "f32" if is_router(planned) else engine_format(planned.tensor, exact=False)
        if kind not in MAPPED_FORMATS.values():
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
    # `progress` is the title of the progress bar. If it is empty, tqdm is not even imported.
    if progress:
        _add_with_bar(builder, tensors, exact=exact, copied=copied, title=progress)
    else:
        for converted in _convert_all(tensors, exact=exact):
            _add(builder, converted, copied=copied)
    _check_files(part for planned in tensors for part in planned.tensor.parts)


def _check_files(mapped: Iterable[Bytes]) -> None:
    """Raise ModelFormatError if a file was truncated while it was read."""
    from lmdeploy._turbomind import check_mapped_file

    try:
        for data in mapped:
            check_mapped_file(data)
    except RuntimeError as error:
        raise ModelFormatError(str(error)) from error


def _add_with_bar(
    builder: WeightsBuilder,
    tensors: Sequence[PlannedTensor],
    *,
    exact: bool,
    copied: bool,
    title: str,
) -> None:
    from tqdm import tqdm

    bar = tqdm(
        total=sum(planned.tensor.num_bytes for planned in tensors),
        desc=title,
        unit="B",
        unit_scale=True,
    )
    with bar:
        for converted in _convert_all(tensors, exact=exact):
            _add(builder, converted, copied=copied)
            bar.update(converted.planned.tensor.num_bytes)


def _convert_all(tensors: Sequence[PlannedTensor], *, exact: bool) -> Iterator[_Converted]:
    """Yield the tensors in order. A thread converts the next while the caller packs this one."""
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
    if not planned.is_expert:
        check_exponents(tensor)
    if planned.mapped:
        return _Converted(planned, MAPPED_FORMATS[tensor.format], tensor.raw, tensor.scales)
    prefetch_pages(tensor.raw)
    heads = planned.interleaved_heads
    interleaved = planned.interleaved_rows
    if planned.is_vector:
        vector = vector_for_engine(
            tensor,
            interleaved_heads=heads,
            interleaved_rows=interleaved,
            offset=planned.offset,
            convert=planned.convert,
            scale=planned.scale,
        )
        return _Converted(planned, _VECTOR, vector)
    kind, values = matrix_for_engine(
        tensor,
        exact=exact or is_router(planned),
        interleaved_heads=heads,
        interleaved_rows=interleaved,
        transposed=planned.transposed,
        scale=planned.scale,
    )
    scales = scales_for_engine(tensor, kind, interleaved_heads=heads, interleaved_rows=interleaved)
    return _Converted(planned, kind, values, scales)


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
            converted.scales,
        )
    if planned.mapped and not copied:
        return
    for part in tensor.parts:
        release_pages(part)

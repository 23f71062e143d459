"""Tensors under the names of transformers' text model, whatever prefixes the folder gives them.

Folders of embedding models lack `model.`; those of models that also read pictures, and those that
were saved from within another module, have further prefixes.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.tensor_file import SUPPORTED_FORMATS, StoredTensor, TensorFile

_MODEL = "model."
_VISION_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "visual.",
    "vision_model.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
)


class UsualNames:
    """The tensors of a folder, named as in `usual`. Those of vision and audio are left out.

    `usual` maps the engine's names to the usual ones, as ModelFamily.hf_tensors does. The tensor
    "embedding" shows the prefix. Raise ModelFormatError if two tensors get the same name.
    """

    def __init__(
        self, file: TensorFile, usual: Mapping[str, str], *, has_vision: bool, source: str
    ) -> None:
        self._file = file
        kept = [
            name
            for name in file.names
            if not (has_vision and name.removeprefix(_MODEL).startswith(_VISION_PREFIXES))
        ]
        heads = {name.split(".")[0] for name in usual.values() if not name.startswith(_MODEL)}
        embedding = usual["embedding"].removeprefix(_MODEL)
        found = [name for name in kept if f".{name}".endswith(f".{embedding}")]
        prefix = found[0].removesuffix(embedding) if len(found) == 1 else _MODEL
        self._stored: dict[str, str] = {}
        for name in kept:
            text = _usual_name(name, prefix, heads=heads)
            if text in self._stored:
                raise ModelFormatError(
                    f"{source}: tensors {self._stored[text][:80]} and {name[:80]} are both {text}."
                )
            self._stored[text] = name

    @property
    def names(self) -> list[str]:
        """Return the usual names of all tensors."""
        return list(self._stored)

    def tensor(
        self, name: str, *, max_dims: int = 2, formats: tuple[str, ...] = SUPPORTED_FORMATS
    ) -> StoredTensor:
        """Return a tensor. Raise ModelFormatError for another format or more dimensions."""
        return self._file.tensor(self._stored[name], max_dims=max_dims, formats=formats)


def _usual_name(name: str, prefix: str, *, heads: set[str]) -> str:
    """Return the name with `model.` for `prefix`, or without it for a part beside the layers."""
    around = prefix.removesuffix(_MODEL) if f".{prefix}".endswith(f".{_MODEL}") else prefix
    inner = name.removeprefix(prefix if name.startswith(prefix) else around)
    if inner.split(".")[0] in heads:
        return inner
    return _MODEL + inner if name.startswith(prefix) else name

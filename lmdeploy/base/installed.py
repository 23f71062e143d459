"""What is installed beside us, for the warning at import and for `lmdeploy check_env`."""

from __future__ import annotations

import os
import sys
import warnings

OURS = "lmdeploy-fp4"
NAMESAKE = "lmdeploy"


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None when it is absent."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def namesake_warning() -> str | None:
    """A sentence when the distribution `lmdeploy` shares our import name in this environment."""
    # Asked at every import: the library that knows takes longer to import than this to look.
    version = installed_version(NAMESAKE) if _may_be_installed(NAMESAKE) else None
    if version is None:
        return None
    return (
        f"the distribution lmdeploy {version} is installed beside {OURS}: both own the import name "
        f"and the command lmdeploy; keep one of them, e.g. "
        f"pip uninstall lmdeploy, then install {OURS} again, with --force-reinstall"
    )


def _may_be_installed(distribution: str) -> bool:
    """Whether some folder of the path has metadata of that name, installed or unpacked."""
    beginnings = (f"{distribution}-", f"{distribution}.egg-info")
    for folder in sys.path:
        try:
            if any(name.lower().startswith(beginnings) for name in os.listdir(folder or ".")):
                return True
        except NotADirectoryError:
            return True  # an archive: let the library look into it
        except OSError:
            continue
    return False


def warn_of_namesake() -> None:
    """Warns once, at import."""
    text = namesake_warning()
    if text:
        warnings.warn(text, RuntimeWarning, stacklevel=3)

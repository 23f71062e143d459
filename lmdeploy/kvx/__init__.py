"""libkvx from Python: the structs of its headers, its functions, and where both are installed."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from lmdeploy.kvx import abi

__all__ = ["KvxError", "check", "include_folder", "library", "library_path"]

_PACKAGE = Path(__file__).resolve().parents[1]


class KvxError(ValueError):
    """A call of libkvx that returned another status than OK."""

    def __init__(self, status: abi.Status) -> None:
        super().__init__(f"libkvx returned {status.name}. See the header for the rules.")
        self.status = status


def library_path() -> Path:
    """Return the path of libkvx.so.1."""
    return _PACKAGE / "libkvx.so.1"


def include_folder() -> Path:
    """Return the folder that contains kvx/kvx_abi.h."""
    installed = _PACKAGE / "include"
    return installed if installed.is_dir() else _PACKAGE.parent / "components/kvx/include"


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, with the types of its functions set.

    Raise OSError without it, and KvxError if it has another major version of the ABI.
    """
    loaded = ctypes.CDLL(str(library_path()))
    for name, types in abi.FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes = types
        function.restype = ctypes.c_int
    version = abi.Version(abi_major=abi.VERSION_MAJOR)
    check(loaded.kvx_get_version(version))
    return loaded


def check(status: int) -> None:
    """Raise KvxError unless the status of a call is OK."""
    if status != abi.Status.OK:
        raise KvxError(abi.Status(status))

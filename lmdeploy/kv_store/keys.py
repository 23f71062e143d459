"""The names of blocks in a store, and the code that proves where a value comes from."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmdeploy.base.checks import show
from lmdeploy.base.files import open_regular_file

KEY_VARIABLE = "LMDEPLOY_KV_STORE_KEY"
_MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_MAC_BYTES = 32


class BlockKeys:
    """Names and authenticates the blocks of one cache configuration.

    A name is an HMAC over the identity of the cache, the salt and all tokens up to the end of the
    block. Without the secret, nobody can compute the name of a text or make a value that is
    accepted. Values are not encrypted.
    """

    def __init__(self, secret: bytes, identity: dict[str, Any], *, block_tokens: int) -> None:
        self._name_key = _derived(secret, b"name")
        self._value_key = _derived(secret, b"value")
        self._root = _digest(self._name_key, json.dumps(identity, sort_keys=True).encode())
        self._block_tokens = block_tokens

    def names(self, tokens: Sequence[int], salt: bytes) -> list[str]:
        """Return the name of each whole block of `tokens`: 64 hexadecimal digits."""
        names = []
        digest = _digest(self._name_key, self._root + salt)
        size = self._block_tokens
        for begin in range(0, len(tokens) // size * size, size):
            block = struct.pack(f"<{size}i", *tokens[begin : begin + size])
            digest = _digest(self._name_key, digest + block)
            names.append(digest.hex())
        return names

    def seal(self, name: str, data: bytes) -> bytes:
        """Return `data` with the code that proves its origin and its name."""
        return data + _digest(self._value_key, name.encode() + data)

    def open(self, name: str, value: bytes) -> bytes | None:
        """Return the data of a sealed value, or None if it was not sealed for this name."""
        data, code = value[:-_MAC_BYTES], value[-_MAC_BYTES:]
        expected = _digest(self._value_key, name.encode() + data)
        return data if hmac.compare_digest(code, expected) else None


def _digest(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return _digest(hashlib.sha256(secret).digest(), purpose)


def read_secret(path: str | None, *, beside: Path | None) -> bytes:
    """Return the secret of a store.

    Args:
        path: file of the secret. None takes the environment variable LMDEPLOY_KV_STORE_KEY.
        beside: the folder of a store on this machine. A secret that is given nowhere is then read
            from the file `<folder>.key`, which is created if needed. None requires a secret.

    Raises ValueError if there is no secret, or if others could read or guess it.
    """
    if path is not None:
        return _read(Path(path))
    text = os.environ.get(KEY_VARIABLE)
    if text is not None:
        return _checked(text.strip().encode(), KEY_VARIABLE)
    if beside is None:
        raise ValueError(
            "A KV store in the network needs a secret. Write at least 16 random bytes to a file "
            f"and pass it with --kv-store-key, or set {KEY_VARIABLE}."
        )
    file = beside.with_name(beside.name + ".key")
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(file)
    except OSError as error:
        raise ValueError(f"The key file {file} cannot be created: {error.strerror}.") from None
    with os.fdopen(descriptor, "w") as out:
        out.write(secrets.token_hex(32))
    return _read(file)


def _read(file: Path) -> bytes:
    with open_regular_file(file) as (descriptor, _):
        mode = os.fstat(descriptor).st_mode
        data = os.read(descriptor, _MAX_SECRET_BYTES + 1)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"Others can read the key file {file}. Run: chmod 600 {file}")
    return _checked(data.strip(), f"The key file {file}")


def _checked(secret: bytes, source: str) -> bytes:
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ValueError(
            f"{show(source)} has {len(secret)} bytes. It must have {_MIN_SECRET_BYTES} to "
            f"{_MAX_SECRET_BYTES}."
        )
    return secret

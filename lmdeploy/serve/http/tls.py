"""Finds the private key and the certificate of a server that uses TLS (--ssl)."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import NamedTuple


class TlsFiles(NamedTuple):
    """Paths of PEM files: the private key, and the certificate with those of its issuers."""

    keyfile: str
    certfile: str


def find_tls_files() -> TlsFiles:
    """Return the paths in the environment variables SSL_KEYFILE and SSL_CERTFILE.

    Raises ValueError if one of them is unset or the files cannot be used.
    """
    files = TlsFiles(_path("SSL_KEYFILE"), _path("SSL_CERTFILE"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password makes OpenSSL refuse an encrypted key instead of asking the terminal.
        context.load_cert_chain(files.certfile, files.keyfile, password="")
    except OSError as error:  # SSLError is one
        raise ValueError(
            f"SSL_CERTFILE is {files.certfile!r} and SSL_KEYFILE is {files.keyfile!r}. They must "
            "be a certificate and its private key without a password, as PEM files (--ssl): "
            f"{error}."
        ) from None
    return files


def _path(name: str) -> str:
    path = os.environ.get(name, "")
    if not path:
        raise ValueError(f"{name} is unset. It must be the path of a PEM file (--ssl).")
    if not Path(path).is_file():
        raise ValueError(f"{name} is {path!r}. It must be the path of a PEM file (--ssl).")
    return path

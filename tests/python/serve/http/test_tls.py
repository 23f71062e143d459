"""Tests of HTTPS with a certificate that the test makes."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from fake_engine import make_engine
from serving import CHAT, serving

from lmdeploy.serve.http import accepting
from lmdeploy.serve.http.tls import TlsFiles, find_tls_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    made = TlsFiles(str(folder / "key.pem"), str(folder / "certificate.pem"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", made.keyfile, "-out", made.certfile]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.fixture
def variables(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("SSL_KEYFILE", files.keyfile)
    monkeypatch.setenv("SSL_CERTFILE", files.certfile)
    return monkeypatch


def test_server_with_ssl_serves_https(files: TlsFiles, variables: pytest.MonkeyPatch) -> None:
    verified = ssl.create_default_context(cafile=files.certfile)
    with serving(make_engine(), ssl=True) as url:
        assert url.startswith("https://")
        with httpx.Client(verify=verified, base_url=url) as client:
            assert client.get("/health").status_code == 200
            own = {"origin": url}
            assert client.post("/v1/chat/completions", json=CHAT, headers=own).status_code == 200
            plain = {"origin": url.replace("https", "http").replace("127.0.0.1", "a.test")}
            assert client.post("/v1/chat/completions", json=CHAT, headers=plain).status_code == 403
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url.replace("https", "http") + "/health")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/health")


def test_server_without_descriptors_refuses_over_https(
    files: TlsFiles, variables: pytest.MonkeyPatch
) -> None:
    variables.setattr(accepting, "first_reserved_descriptor", lambda: 0)
    verified = ssl.create_default_context(cafile=files.certfile)
    with serving(make_engine(), ssl=True) as url:
        refused = httpx.get(f"{url}/health", verify=verified)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("name", ["SSL_KEYFILE", "SSL_CERTFILE"])
def test_find_tls_files_names_the_variable(
    name: str, variables: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_tls_files()
    for value in (str(tmp_path / "absent.pem"), str(tmp_path), ""):
        variables.setenv(name, value)
        with pytest.raises(ValueError, match=rf"^{name} is .*PEM file \(--ssl\)"):
            find_tls_files()
    variables.delenv(name)
    with pytest.raises(ValueError, match=f"^{name} is unset"):
        find_tls_files()


def test_find_tls_files_refuses_unusable_files(
    files: TlsFiles, variables: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other, locked = tmp_path / "other.pem", tmp_path / "locked.pem"
    subprocess.run(["openssl", "genrsa", "-out", other, "2048"], check=True, capture_output=True)
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:abcd", "-in", files.keyfile]
    subprocess.run([*command, "-out", locked], check=True, capture_output=True)
    (tmp_path / "text.pem").write_text("no key")
    for path in (other, locked, tmp_path / "text.pem"):
        variables.setenv("SSL_KEYFILE", str(path))
        with pytest.raises(ValueError, match="a certificate and its private key"):
            find_tls_files()

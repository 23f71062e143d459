"""Tests of the names of blocks, of sealed values and of the secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmdeploy.kv_store.keys import KEY_VARIABLE, BlockKeys, read_secret

SECRET = b"0123456789abcdef"


def keys(secret: bytes = SECRET, **identity: object) -> BlockKeys:
    return BlockKeys(secret, identity, block_tokens=4)


def test_a_name_depends_on_everything_that_the_bytes_depend_on() -> None:
    tokens, salt = list(range(9)), bytes(16)
    names = keys().names(tokens, salt)
    assert len(names) == 2 and len(set(names)) == 2
    assert names == keys().names(tokens[:8], salt)
    assert names[0] == keys().names([*tokens[:4], 99, 99, 99, 99], salt)[0]
    others = [
        keys(b"another secret..").names(tokens, salt),
        keys(model="m").names(tokens, salt),
        keys().names(tokens, b"\1" * 16),
        keys().names([8, *tokens[1:]], salt),
    ]
    for other in others:
        assert not set(names) & set(other)


def test_only_a_sealed_value_of_the_same_name_is_opened() -> None:
    sealed = keys().seal("a", b"data")
    assert keys().open("a", sealed) == b"data"
    assert keys().open("b", sealed) is None
    assert keys(b"another secret..").open("a", sealed) is None
    for wrong in (b"", sealed[:-1], sealed[1:], sealed + b"x", b"x" + sealed[1:]):
        assert keys().open("a", wrong) is None


def test_a_folder_gets_a_secret_of_its_own_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    folder = tmp_path / "store"
    secret = read_secret(None, beside=folder)
    file = tmp_path / "store.key"
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(secret) == 64 and read_secret(None, beside=folder) == secret
    assert read_secret(str(file), beside=None) == secret


def test_secrets_that_others_could_know_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="needs a secret"):
        read_secret(None, beside=None)
    file = tmp_path / "key"
    with pytest.raises(ValueError, match="cannot be read"):
        read_secret(str(file), beside=None)
    file.write_bytes(SECRET)
    file.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        read_secret(str(file), beside=None)
    file.chmod(0o600)
    assert read_secret(str(file), beside=None) == SECRET
    file.write_bytes(b"short\n")
    with pytest.raises(ValueError, match="has 5 bytes"):
        read_secret(str(file), beside=None)
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ValueError, match="has 5 bytes"):
        read_secret(None, beside=None)
    monkeypatch.setenv(KEY_VARIABLE, SECRET.decode())
    assert read_secret(None, beside=None) == SECRET

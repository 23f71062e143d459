"""Tests of `lmdeploy kv-store` on a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmdeploy.cli.main import main
from lmdeploy.kv_store.address import open_store

NAMES = [f"{i:064x}" for i in range(3)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/store"
    store = open_store(url)
    for i, name in enumerate(NAMES):
        store.put(name, bytes(1000 * (i + 1)))
    return url


def test_kv_store_shows_and_removes_blocks(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-store", "stat", url]) == 0
    assert capsys.readouterr().out == "3 blocks, 6,000 bytes (0.0 MiB)\n"
    assert main(["kv-store", "ls", url]) == 0
    assert sorted(capsys.readouterr().out.split("\n"))[1].startswith(f"{NAMES[0]} 1000 ")
    assert main(["kv-store", "rm", url, NAMES[0], "f" * 64]) == 1
    assert main(["kv-store", "rm", url, "--all"]) == 0
    assert capsys.readouterr().out == "1 blocks removed\n2 blocks removed\n"
    assert not list(open_store(url).entries())


@pytest.mark.parametrize("names", [[], [NAMES[0], "--all"], ["../x"]])
def test_kv_store_refuses_wrong_names(
    url: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["kv-store", "rm", url, *names])
    assert stopped.value.code in (1, 2)
    assert capsys.readouterr().err.startswith("lmdeploy: error: ")
    assert len(list(open_store(url).entries())) == 3

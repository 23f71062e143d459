"""Tests of the tuner's file: what is written is read, and nothing else is trusted."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lmdeploy._turbomind import TunedChoice
from lmdeploy.base import tuner_file
from lmdeploy.base.tuner_file import (
    TunerFileError,
    describe_file,
    read_choices,
    tuner_is_on,
    write_choices,
)

MACHINE = "NVIDIA H100 80GB HBM3, SM 90, driver 580.1 (CUDA 13.0), cuBLASLt 130102, kernels 1 ab"
ROW = {"question": "q8_0 4 x 4, 1 row", "kernel": "tile", "table_kernel": "stream1"}
ROW |= {"us": 2.5, "table_us": 3.0}  # type: ignore[dict-item]


def choice(question: str = "q", us: float = 1.5) -> TunedChoice:
    """Return a choice with this question and time."""
    return TunedChoice(
        question=question, kernel="tile", table_kernel="stream1", us=us, table_us=2.0
    )


def facts(found: list[TunedChoice]) -> list[tuple[str, str, str, float, float]]:
    """Return the fields of each choice."""
    return [(x.question, x.kernel, x.table_kernel, x.us, x.table_us) for x in found]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of MACHINE in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(tuner_file.SWITCH, "1")
    found = tuner_file.tuner_file(MACHINE)
    assert found is not None
    return found


def test_tuner_file_is_named_by_the_gpu(path: Path, tmp_path: Path) -> None:
    assert path == tmp_path / "lmdeploy" / "tuner" / "nvidia_h100_80gb_hbm3.json"
    assert tuner_file.tuner_file("../../x, SM 90") == path.with_name("x.json")
    assert tuner_file.tuner_file("") == path.with_name("gpu.json")


def test_read_choices_returns_what_was_written(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_choices(path, MACHINE)
    write_choices(path, MACHINE, choices=[choice("a"), choice("b", 0.12345)])
    assert facts(read_choices(path, MACHINE)) == [
        ("a", "tile", "stream1", 1.5, 2.0),
        ("b", "tile", "stream1", 0.123, 2.0),
    ]
    write_choices(path, MACHINE, choices=[])
    assert read_choices(path, MACHINE) == []
    assert [x.name for x in path.parent.iterdir()] == [path.name]


def test_write_choices_keeps_the_newest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_file, "_MAX_CHOICES", 3)
    write_choices(path, MACHINE, choices=[choice(name) for name in "abcde"])
    assert [x.question for x in read_choices(path, MACHINE)] == ["c", "d", "e"]


@pytest.mark.parametrize(
    "part", ["NVIDIA H100", "SM 90", "580.1", "CUDA 13.0", "130102", "kernels 1 ab"]
)
def test_read_choices_of_another_machine_is_an_error(path: Path, part: str) -> None:
    write_choices(path, MACHINE, choices=[choice()])
    with pytest.raises(TunerFileError, match="another driver, library, version or GPU"):
        read_choices(path, MACHINE.replace(part, "other"))


@pytest.mark.parametrize(
    "change",
    [
        {"question": None},
        {"question": "x" * 201},
        {"question": "\ud800"},
        {"kernel": 3},
        {"table_kernel": ["tile"]},
        {"us": "1"},
        {"us": -1},
        {"us": True},
        {"us": None},
        {"table_us": 10**400},
        {"more": 1},
    ],
)
def test_read_choices_rejects_a_wrong_choice(path: Path, change: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"machine": MACHINE, "choices": [ROW]}))
    assert len(read_choices(path, MACHINE)) == 1
    path.write_text(json.dumps({"machine": MACHINE, "choices": [ROW, ROW | change]}))
    with pytest.raises(TunerFileError, match="choice"):
        read_choices(path, MACHINE)
    without = {key: value for key, value in ROW.items() if key not in change}
    path.write_text(json.dumps({"machine": MACHINE, "choices": [without]}))
    if without != ROW:
        with pytest.raises(TunerFileError, match="exactly"):
            read_choices(path, MACHINE)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "\0" * 100, '{"machine": NaN}', "[" * 100_000, '{"machine": 1, "choices": []}'],
)
def test_read_choices_rejects_a_damaged_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(TunerFileError) as caught:
        read_choices(path, MACHINE)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("choices", [None, {}, "x", [None], [[]], [{}], [1] * 10_001])
def test_read_choices_rejects_a_wrong_list(path: Path, choices: object) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"machine": MACHINE, "choices": choices}))
    with pytest.raises(TunerFileError):
        read_choices(path, MACHINE)


def test_read_choices_rejects_each_truncated_file(path: Path) -> None:
    write_choices(path, MACHINE, choices=[choice("a"), choice("b")])
    whole = path.read_bytes()
    for size in range(len(whole.rstrip())):
        path.write_bytes(whole[:size])
        with pytest.raises(TunerFileError):
            read_choices(path, MACHINE)


def test_read_choices_rejects_huge_files_and_other_kinds(path: Path) -> None:
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TunerFileError, match="must have at most"):
        read_choices(path, MACHINE)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TunerFileError, match="FIFO"):
        read_choices(path, MACHINE)
    path.unlink()
    path.mkdir()
    with pytest.raises(TunerFileError, match="folder"):
        read_choices(path, MACHINE)
    path.rmdir()
    path.symlink_to(path)
    with pytest.raises(TunerFileError, match="cannot be read"):
        read_choices(path, MACHINE)


def test_write_choices_leaves_nothing_unfinished(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_choices(path, MACHINE, choices=[choice("old")])

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuner_file.os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_choices(path, MACHINE, choices=[choice("new")])
    assert [x.name for x in path.parent.iterdir()] == [path.name]
    assert [x.question for x in read_choices(path, MACHINE)] == ["old"]


def test_concurrent_writers_and_readers_see_whole_files(path: Path) -> None:
    names = [[f"{writer}-{i}" for i in range(200)] for writer in range(4)]
    errors: list[BaseException] = []
    write_choices(path, MACHINE, choices=[choice(name) for name in names[0]])

    def write(writer: int) -> None:
        try:
            for _ in range(10):
                write_choices(path, MACHINE, choices=[choice(name) for name in names[writer]])
                assert [x.question for x in read_choices(path, MACHINE)] in names
        except BaseException as error:  # reported by the test's thread
            errors.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [x.name for x in path.parent.iterdir()] == [path.name]


def test_tuner_is_on_takes_0_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, is_on in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv(tuner_file.SWITCH, text)
        assert tuner_is_on() == is_on
    monkeypatch.setenv(tuner_file.SWITCH, "yes")
    with pytest.raises(ValueError, match=r"LMDEPLOY_TUNER is 'yes'. It must be 0 or 1"):
        tuner_is_on()


def test_describe_file_shows_age_and_validity(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_file(MACHINE) == f"no {path} yet; the first start of a model writes it"
    write_choices(path, MACHINE, choices=[choice("a"), choice("b")])
    os.utime(path, (0, path.stat().st_mtime - 3 * 86400))
    assert describe_file(MACHINE) == f"{path}, 2 choices, 3.0 days old"
    assert describe_file(MACHINE + "x").startswith(f"{path} will be measured again. The file is of")
    path.write_text("{")
    assert "will be measured again. The content is not valid JSON" in describe_file(MACHINE)
    monkeypatch.setenv(tuner_file.SWITCH, "0")
    assert describe_file(MACHINE) == "off (LMDEPLOY_TUNER=0)"

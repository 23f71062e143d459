"""Tests of GGUF files in parts, and of folders and hub ids with several quantizations."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from engine_runs import EngineRun
from tiny_gguf import write_gguf
from tiny_models import TINY_MODELS, make_model

from lmdeploy import Tokenizer, TurbomindEngineConfig
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint import fingerprint, weight_cache
from lmdeploy.checkpoint import load as weight_loader
from lmdeploy.checkpoint.files.gguf_names import gguf_models, quantization_of, split_tag
from lmdeploy.checkpoint.files.gguf_parts import part_names, part_paths
from lmdeploy.checkpoint.fingerprint import hash_model, identify_files
from lmdeploy.checkpoint.hub import resolve_model
from lmdeploy.checkpoint.open import open_checkpoint
from lmdeploy.engine.load import load_engine

IDS = [1, 5, 40, 7, 300, 12]
PARTS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "tiny-Q8_0.gguf"
    write_gguf(make_model(TINY_MODELS[0]), path, weight_format="Q8_0")
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the parts of the same model, as the gguf package writes them."""
    folder = tmp_path_factory.mktemp("parts")
    path = folder / "tiny-Q8_0.gguf"
    write_gguf(make_model(TINY_MODELS[0]), path, weight_format="Q8_0", tensors_per_part=6)
    assert len(list(folder.iterdir())) == PARTS
    return folder


@pytest.fixture
def parts(written: Path, tmp_path: Path) -> list[Path]:
    """Return the paths of a copy of the parts."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return sorted(tmp_path.glob("*.gguf"))


def logits(path: str | Path) -> np.ndarray:
    with EngineRun(str(path), exact=False) as run:
        return run.logits(IDS)


def rewrite(path: Path, change: dict[str, Any], *, drop: str = "") -> None:
    """Write a part again with changed split keys and without the tensor `drop`."""
    reader = gguf.GGUFReader(path)
    target = path.with_suffix(".new")
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = change.get(name, field.contents())
            if value is not None:
                writer.add_key_value(name, value, *field.types[:2])
    for tensor in reader.tensors:
        if tensor.name != drop:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.replace(path)


def test_any_part_and_the_folder_open_the_whole_model(whole: Path, parts: list[Path]) -> None:
    expected = logits(whole)
    for model in (parts[0].parent, parts[0], parts[2]):
        assert resolve_model(str(model)) == parts[0]
        np.testing.assert_array_equal(logits(model), expected)
    assert Tokenizer(str(parts[1])).encode("the") == Tokenizer(str(whole)).encode("the")


def test_fingerprint_of_parts_equals_that_of_the_whole_file(whole: Path, parts: list[Path]) -> None:
    assert hash_model(str(parts[3])) == hash_model(str(whole))
    identities = identify_files(parts[1]).files
    assert [Path(name).name for name, *_ in identities] == [path.name for path in parts]


def test_progress_covers_all_parts(whole: Path, parts: list[Path]) -> None:
    def file_bytes(path: Path) -> int:
        return sum(planned.tensor.num_bytes for planned in open_checkpoint(path).tensors)

    assert file_bytes(parts[0]) == file_bytes(whole)


def test_weight_cache_of_parts_is_used_until_a_part_changes(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMDEPLOY_CACHE", "1")
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_loader, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(fingerprint, "SETTLE_NS", -(10**18))
    monkeypatch.setattr(weight_cache, "_START_SECONDS", 0.0)

    def start(path: Path) -> tuple[np.ndarray, bool]:
        with EngineRun(str(path), exact=False) as run:
            writer = run.model.cache_writer
            if writer is not None:
                writer.start()
                assert writer.join(60.0) and writer.stored
            return run.logits(IDS), writer is None

    first, from_cache = start(parts[0])
    assert not from_cache
    second, from_cache = start(parts[3])
    assert from_cache
    np.testing.assert_array_equal(first, second)
    parts[3].touch()
    assert not start(parts[0])[1]


def test_load_engine_of_a_tag_serves_and_restarts(parts: list[Path]) -> None:
    config = TurbomindEngineConfig(session_len=64, max_batch_size=1, num_threads=1)
    config.cache_max_entry_count = 4
    _, running = load_engine(f"{parts[0].parent}:q8_0", config, progress=False)
    running.on_close()
    running.core.close()
    parts[2].touch()
    with pytest.raises(ModelFormatError, match="files of the model have changed"):
        running.restart()


def test_missing_parts_are_rejected_by_name(parts: list[Path]) -> None:
    parts[1].unlink()
    for path in (parts[0], parts[3], parts[0].parent):
        with pytest.raises(
            ModelFormatError, match=r"1 of 4 parts.*missing: tiny-Q8_0-00002-of-00004\.gguf\."
        ):
            open_checkpoint(resolve_model(str(path)))
    parts[2].unlink()
    with pytest.raises(ModelFormatError, match=r"2 of 4 parts.*00002-of-00004.*00003-of-00004"):
        open_checkpoint(parts[0])


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, {"split.count": 5}, r"00001-of-00004\.gguf: split\.count is 5.*name.*must be 4"),
        (2, {"split.count": 3}, r"00003-of-00004\.gguf: split\.count is 3.*name.*must be 4"),
        (2, {"split.count": None}, r"00003-of-00004\.gguf: split\.count is missing"),
        (1, {"split.no": 2}, r"00002-of-00004\.gguf: split\.no is 2.*name.*must be 1"),
        (3, {"split.tensors.count": 9}, r"00004-of-00004.*tensors\.count is 9.*first.*must be 21"),
    ],
)
def test_parts_whose_keys_differ_are_rejected(
    parts: list[Path], number: int, change: dict[str, Any], message: str
) -> None:
    rewrite(parts[number], change)
    with pytest.raises(ModelFormatError, match=message):
        open_checkpoint(parts[0])


def test_parts_without_a_tensor_or_with_one_twice_are_rejected(parts: list[Path]) -> None:
    name = gguf.GGUFReader(parts[3]).tensors[0].name
    rewrite(parts[3], {}, drop=name)
    with pytest.raises(ModelFormatError, match=r"4 parts have 20 tensors.*must have 21"):
        open_checkpoint(parts[0])
    shutil.copy(parts[1], parts[2])
    rewrite(parts[2], {"split.no": 2})
    with pytest.raises(ModelFormatError, match=r"00003-of-00004.*is also in .*00002-of-00004"):
        open_checkpoint(parts[0])


def test_renamed_part_is_rejected(parts: list[Path], tmp_path: Path) -> None:
    alone = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFormatError, match=r"split\.count is 4.*end in -00001-of-00004\.gguf"):
        open_checkpoint(alone)


def test_truncated_part_is_rejected_by_name(parts: list[Path]) -> None:
    with parts[2].open("r+b") as file:
        file.truncate(parts[2].stat().st_size - 64)
    with pytest.raises(ModelFormatError, match=r"00003-of-00004\.gguf.*truncated or corrupt"):
        open_checkpoint(parts[0])


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("a.gguf", ("a.gguf",)),
        ("a-00001-of-00002.gguf", ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf")),
        ("a-00003-of-00002.gguf", ("a-00003-of-00002.gguf",)),
        ("a-00000-of-00002.gguf", ("a-00000-of-00002.gguf",)),
        ("a-1-of-2.gguf", ("a-1-of-2.gguf",)),
        ("-00001-of-00002.gguf", ("-00001-of-00002.gguf",)),
    ],
)
def test_part_names_follow_gguf_split(name: str, names: tuple[str, ...]) -> None:
    assert part_names(name) == names


def test_part_paths_of_a_whole_file_do_not_look_at_the_folder(tmp_path: Path) -> None:
    assert part_paths(tmp_path / "none" / "a.gguf") == (tmp_path / "none" / "a.gguf",)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "q4_k_m"),
        ("Qwen3-8B.Q5_K_S.gguf", "Q5_K_S"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("model-IQ3_XXS-00002-of-00003.gguf", "IQ3_XXS"),
        ("model-BF16.gguf", "BF16"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("UD-Q2_K_XL/DeepSeek-00001-of-00004.gguf", "UD-Q2_K_XL"),
        ("gemma-3-1b-it.gguf", ""),
    ],
)
def test_quantization_of_names_of_known_writers(name: str, expected: str) -> None:
    assert quantization_of(name) == expected


def test_gguf_models_leave_out_other_files_and_later_parts() -> None:
    names = ["b-00002-of-00002.gguf", "b-00001-of-00002.gguf", "mmproj-F16.gguf", "a.gguf"]
    assert gguf_models([*names, "imatrix_unsloth.gguf", "README.md"]) == [
        "a.gguf",
        "b-00001-of-00002.gguf",
    ]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("owner/name:Q4_K_M", ("owner/name", "Q4_K_M")),
        ("owner/name", ("owner/name", None)),
        ("a:b/c", ("a:b/c", None)),
        (":Q4_K_M", (":Q4_K_M", None)),
        ("name:", ("name:", None)),
    ],
)
def test_split_tag(model: str, expected: tuple[str, str | None]) -> None:
    assert split_tag(model) == expected


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Return a folder with the names of a repository on the hub, as empty files."""
    for name in (
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "m-UD-Q4_K_XL.gguf",
        "m-Q4_K_XL.gguf",
        "m-Q8_0-00001-of-00002.gguf",
        "m-Q8_0-00002-of-00002.gguf",
        "BF16/m-BF16.gguf",
        "mmproj-F16.gguf",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_s", "m-Q4_K_S.gguf"),
        ("Q4_K_XL", "m-Q4_K_XL.gguf"),
        ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("Q8_0", "m-Q8_0-00001-of-00002.gguf"),
        ("BF16", "BF16/m-BF16.gguf"),
    ],
)
def test_resolve_model_tag_selects_a_file_of_the_folder(several: Path, tag: str, name: str) -> None:
    assert resolve_model(f"{several}:{tag}") == several / name


def test_resolve_model_ambiguous_names_are_rejected_with_a_list(several: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"There are 6 \.gguf models: BF16/m-BF16\.gguf, m-"):
        resolve_model(str(several))
    with pytest.raises(ModelFormatError, match=r"Q4_K fits none of the 6 .*m-Q4_K_M.*:BF16\."):
        resolve_model(f"{several}:Q4_K")
    (several / "other-Q4_K_M.gguf").touch()
    with pytest.raises(ModelFormatError, match=r"fits 2 of the 7 .*: m-Q4_K_M.*other-Q4_K_M"):
        resolve_model(f"{several}:Q4_K_M")
    assert resolve_model(f"{several / 'm-Q4_K_M.gguf'}") == several / "m-Q4_K_M.gguf"


def test_resolve_model_existing_path_with_a_colon_has_priority(tmp_path: Path) -> None:
    path = tmp_path / "a:Q4_K_M"
    path.mkdir()
    (path / "config.json").touch()
    assert resolve_model(str(path)) == path


class Hub:
    """A stand-in for huggingface_hub that has the files of a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.calls = folder, []  # type: Path, list[dict[str, Any]]
        self.is_online = True
        monkeypatch.setattr("huggingface_hub.snapshot_download", self._download)
        monkeypatch.setattr("huggingface_hub.list_repo_files", self._names)

    def _download(self, model: str, **options: Any) -> str:
        assert model == "owner/name"
        self.calls.append(options)
        return str(self.folder)

    def _names(self, model: str, *, revision: str | None) -> list[str]:
        if not self.is_online:
            raise OSError("no network")
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        return [str(file.relative_to(self.folder)) for file in files]


@pytest.mark.parametrize("is_online", [True, False])
@pytest.mark.parametrize(
    "model", ["owner/name:Q8_0", "hf.co/owner/name:q8_0", "https://hf.co/owner/name:Q8_0"]
)
def test_resolve_model_hub_id_with_a_tag_downloads_the_parts(
    several: Path, monkeypatch: pytest.MonkeyPatch, *, model: str, is_online: bool
) -> None:
    hub = Hub(several, monkeypatch)
    hub.is_online = is_online
    path = resolve_model(model, revision="v2", download_dir="/d")
    assert path == several / "m-Q8_0-00001-of-00002.gguf"
    names = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    wanted = {"allow_patterns": names, "ignore_patterns": None, "local_files_only": False}
    assert hub.calls[-1] == {**wanted, "revision": "v2", "cache_dir": "/d"}


def test_resolve_model_hub_id_without_a_tag_lists_what_is_there(
    several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(several, monkeypatch)
    with pytest.raises(ModelFormatError, match=r"owner/name: There are 6.*owner/name:BF16"):
        resolve_model("owner/name")
    for path in several.glob("m-*"):
        path.unlink()
    assert resolve_model("owner/name") == several / "BF16/m-BF16.gguf"


def test_cache_log_of_a_removed_part_is_a_warning(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("LMDEPLOY_CACHE", "1")
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_loader, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(fingerprint, "SETTLE_NS", -(10**18))
    monkeypatch.setattr(weight_cache, "_START_SECONDS", 0.0)
    with EngineRun(str(parts[0]), exact=False) as run, caplog.at_level(logging.WARNING):
        parts[2].unlink()
        writer = run.model.cache_writer
        assert writer is not None
        writer.start()
        assert writer.join(60.0) and not writer.stored
    assert "weights are not cached" in caplog.text

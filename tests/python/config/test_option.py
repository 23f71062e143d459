"""Tests of declared options: every fact of an option comes from its field and its docstring."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy import GenerationConfig, TurbomindEngineConfig, _turbomind
from lmdeploy.base.checks import OptionError
from lmdeploy.cli.option_flags import add_flags, flag_values, refused_flags
from lmdeploy.config.lite_options import (
    CalibrationOptions,
    ReportOptions,
    SearchOptions,
    WeightOptions,
)
from lmdeploy.config.option import Option, check, copy_to_core, options_of
from lmdeploy.engine.devices import open_device
from lmdeploy.engine.kv_quality import resolve_kv_options
from lmdeploy.engine.plan import plan_engine
from lmdeploy.engine.prefix_store import identity_of_cache
from lmdeploy.replicas.options import ReplicaOptions
from lmdeploy.serve.state import ServerOptions

CLASSES = (TurbomindEngineConfig, GenerationConfig, ServerOptions, ReplicaOptions)
LITE_CLASSES = (CalibrationOptions, ReportOptions, SearchOptions, WeightOptions)
# The identity of a store with default options, except for the hash of the model. Blocks of another
# identity are not found, so that this changes only together with the bytes of a block.
DEFAULT_IDENTITY = (
    '{"block_tokens": 64, "calibration": null, "dtype": "float16", "exact": false, "head_dim": 64, '
    '"layers": [["none", "none"], ["none", "none"]], "layout": 1, "num_kv_heads": 2, '
    '"overrides": "null", "recent_tokens": -1, "rope_factor": 0.0, "rotation": false, '
    '"scale_search": false, "scales": null, "session_len": null, "sink_tokens": 0, "weights": {}, '
    '"windows": [0, 0]}'
)
NVFP4 = {"quant_policy": "nvfp4"}
# A value of each option that changes the bytes of blocks, and what it needs.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "state_checkpoint_format": ("int8", {}),
    "dtype": ("float32", {}),
    "gemm_input_dtype": ("int8", {}),
    "session_len": (64, {"rope_scaling_factor": 2.0}),
    "cache_block_seq_len": (32, {}),
    "quant_policy": (8, {}),
    "rope_scaling_factor": (2.0, {}),
    "hf_overrides": ({"rms_norm_eps": 1e-3}, {}),
    "deterministic": (True, {}),
    "exact": (True, {}),
    "weight_format": ("int8", {}),
    "kv_quality": ("raw", NVFP4),
    "kv_rotation": (False, NVFP4),
    "kv_scale_search": (False, NVFP4),
    "kv_k_offset": ("none", NVFP4),
    "kv_window": ("16bit", NVFP4),
    "kv_sink_tokens": (128, NVFP4),
    "kv_recent_tokens": (128, NVFP4),
    "kv_cache_format": ("k=fp8,v=nvfp4", {}),
}


@dataclasses.dataclass
class Sample:
    """Options of nothing.

    Args:
        size: how many. More need
            more memory (docs/x.md).
        enable_log: write a log. It grows.
        disable_page: remove the page.
        kind: a or b (default: chosen). It follows other_size.
        other_size: share in %. A larger one is larger.
        names: some names.
    """

    size: Annotated[int | None, Option(low=1, high=9)] = None
    enable_log: Annotated[bool, Option(flags=("--enable-log", "--disable-log"))] = True
    disable_page: bool = False
    kind: Literal["a", "b"] | None = None
    other_size: Annotated[float, Option(above=0, high=1)] = 0.5
    names: list[str] = dataclasses.field(default_factory=list)
    hidden: Annotated[str, Option(flags=None)] = "x"
    tp: Annotated[int, Option(unsupported="there is one")] = 1


def parse(*flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Sample, title="sample")
    return flag_values(Sample, parser.parse_args(flags))


def test_flags_set_the_options_of_their_names() -> None:
    built = {
        option.name: option.default
        for option in options_of(Sample).values()
        if option.flags and option.more.unsupported is None
    }
    assert parse() == built
    assert set(built) == {"size", "enable_log", "disable_page", "kind", "other_size", "names"}
    given = parse("--size=3", "--disable-log", "--disable-page", "--kind=b", "--names", "x", "y")
    assert given == {
        "size": 3,
        "enable_log": False,
        "disable_page": True,
        "kind": "b",
        "other_size": 0.5,
        "names": ["x", "y"],
    }
    assert refused_flags(Sample) == {"--tp": (1, ("1",))}
    with pytest.raises(argparse.ArgumentError, match="invalid whole number value: 'many'"):
        parse("--size", "many")
    with pytest.raises(argparse.ArgumentError, match="not allowed with"):
        parse("--enable-log", "--disable-log")


def test_help_has_the_default_and_the_consequence() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample, title="sample")
    text = " ".join(parser.format_help().split())
    assert "how many. More need more memory (docs/x.md)." in text
    assert "--kind {a,b} a or b (default: chosen). It follows --other-size." in text
    assert "share in % (default: 0.5). A larger one is larger." in text
    assert "--disable-log do not write a log" in text and "--tp" not in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, r"size is 0\. It must be an integer from 1 to 9 \(--size\)"),
        ({"size": True}, "size is True"),
        ({"enable_log": None}, r"must be True or False \(--enable-log\)"),
        ({"kind": "c"}, "must be one of None, a, b"),
        ({"other_size": 0}, "must be a number above 0"),
        ({"other_size": float("nan")}, "finite"),
        ({"names": "x"}, "names is 'x'"),
        ({"names": [""]}, "names contains ''"),
        ({"hidden": 3}, r"must be a non-empty string\.$"),
        ({"tp": 2}, r"tp is 2, which is not supported: there is one\. Leave it at 1\."),
        ({"tp": True}, "tp is True"),
    ],
)
def test_check_refuses_wrong_values(values: dict[str, Any], message: str) -> None:
    check(Sample())
    with pytest.raises(OptionError, match=message):
        check(Sample(**values))
    with pytest.raises(OptionError) as info:
        check(Sample(**values), names_flags=False)
    assert "--" not in str(info.value)


@pytest.mark.parametrize("cls", [*CLASSES, *LITE_CLASSES])
def test_every_option_says_what_it_is(cls: type) -> None:
    lacking = [o.name for o in options_of(cls).values() if not o.meaning]
    assert lacking == [o.name for o in options_of(cls).values() if o.more.unsupported is not None]


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_are_accepted(cls: type) -> None:
    check(cls())


def test_an_option_without_a_default_is_required() -> None:
    @dataclasses.dataclass
    class Needing:
        """Options.

        Args:
            file: what to read.
        """

        file: Path

    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Needing, title="sample")
    assert flag_values(Needing, parser.parse_args(["--file", "x"])) == {"file": Path("x")}
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser.parse_args([])
    assert "default" not in parser.format_help()


@pytest.mark.parametrize(
    ("config", "target"),
    [
        (GenerationConfig(top_p=0.5, ignore_eos=True), _turbomind.Request()),
        (TurbomindEngineConfig(cache_block_seq_len=32), _turbomind.EngineConfig()),
    ],
)
def test_options_of_the_core_are_copied_by_name(config: Any, target: Any) -> None:
    copy_to_core(config, target)
    names = [o.name for o in options_of(type(config)).values() if o.more.to_core]
    assert len(names) >= 3
    for name in names:
        assert getattr(target, name) == pytest.approx(getattr(config, name)), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(TINY_MODELS[0]), tmp_path_factory.mktemp("model"))


def identity(folder: Path, **options: Any) -> str:
    config = TurbomindEngineConfig(device_type="cpu", num_threads=1, **options)
    files, _, kv = plan_engine(str(folder), config, device=open_device(config))
    found = identity_of_cache(str(folder), config, files=files, kv=kv)()
    return json.dumps({k: v for k, v in found.items() if k != "model"}, sort_keys=True)


def test_identity_of_a_store_with_defaults_stays(folder: Path) -> None:
    assert identity(folder) == DEFAULT_IDENTITY


def test_every_option_that_affects_kv_changes_the_identity(folder: Path) -> None:
    marked = {o.name for o in options_of(TurbomindEngineConfig).values() if o.more.affects_kv}
    assert marked == {*CHANGES, "kv_calibration"}
    for name, (value, needed) in CHANGES.items():
        assert identity(folder, **needed, **{name: value}) != identity(folder, **needed), name


def test_contents_of_a_calibration_change_the_identity(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration"
    options: dict[str, Any] = {**NVFP4, "kv_quality": "best", "kv_calibration": path}
    config = TurbomindEngineConfig(device_type="cpu", num_threads=1, **options)
    plain = TurbomindEngineConfig(device_type="cpu", num_threads=1, **NVFP4)
    files, _, _ = plan_engine(str(folder), plain, device=open_device(plain))
    found = []
    for text in ("one", "other"):
        path.write_text(text)
        kv = resolve_kv_options(config, files.info.config.windows)
        found.append(identity_of_cache(str(folder), config, files=files, kv=kv)())
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"calibration"}


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_size": 3},
        {"session_len": 64},
        {"max_prefill_token_num": 64},
        {"cache_max_entry_count": 0.5},
        {"speculative_algorithm": "none"},
        {"enable_metrics": False},
        {"strict_arch": True},
    ],
)
def test_other_options_keep_the_identity(folder: Path, options: dict[str, Any]) -> None:
    assert identity(folder, **options) == DEFAULT_IDENTITY

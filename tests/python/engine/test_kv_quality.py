"""Tests of the options for KV formats and quality: defaults, overrides, tables, errors."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from lmdeploy import TurbomindEngineConfig
from lmdeploy.cli.engine_flags import engine_config
from lmdeploy.cli.main import main, make_parser
from lmdeploy.config.kv_format_options import MAX_TABLE_BYTES, FormatPair, parse_cache_format
from lmdeploy.engine.kv_quality import KvOptions, apply_kv_options, resolve_kv_options

FULL = [0, 0, 0, 0]
MIXED = [0, 16, 0, 16]
INT4 = {"quant_policy": 4}
FOUR_BIT = ["fp4", "mxfp4", "nvfp4", "int4"]


def resolve(windows=FULL, **options) -> KvOptions:
    return resolve_kv_options(TurbomindEngineConfig(**options), windows)


def facts(options: KvOptions):
    window16 = (options.sink_tokens, options.recent_tokens)
    return options.quality, options.rotation, options.scale_search, window16


@pytest.mark.parametrize("name", FOUR_BIT)
def test_resolve_kv_options_four_bit_default_is_balanced(name):
    assert facts(resolve(quant_policy=name)) == ("balanced", True, name != "int4", (64, 64))
    assert resolve(quant_policy=name) == resolve(quant_policy=name, kv_quality="balanced")


@pytest.mark.parametrize("name", ["none", "int8", "fp8", "fp8_e5m2", 0, 8])
def test_resolve_kv_options_other_formats_default_is_raw(name):
    assert facts(resolve(quant_policy=name)) == ("raw", False, False, (0, -1))


@pytest.mark.parametrize("name", [*FOUR_BIT, "int8", "fp8"])
def test_resolve_kv_options_named_quality_is_used(name):
    assert facts(resolve(quant_policy=name, kv_quality="raw")) == ("raw", False, False, (0, -1))
    quality, rotation, _, window16 = facts(resolve(quant_policy=name, kv_quality="balanced"))
    assert (quality, rotation, window16) == ("balanced", True, (64, 64))


WITHOUT_EFFECT = [
    {"kv_quality": "balanced"},
    {"kv_quality": "best"},
    {"kv_quality": "best", "kv_calibration": "/nonexistent"},
    {"kv_calibration": "/nonexistent"},
    {"kv_rotation": True},
    {"kv_scale_search": True},
    {"kv_k_offset": "block"},
    {"kv_window": "int8"},
    {"kv_sink_tokens": 64},
    {"kv_recent_tokens": 0},
    {"kv_recent_tokens": 64},
]


@pytest.mark.parametrize("given", WITHOUT_EFFECT)
def test_engine_config_options_without_effect_are_rejected(given):
    name = next(iter(given))
    text = rf"^{name} .* has no effect with the KV format none, which.* Remove --{name[:2]}-"
    for layers in ("none", {"default": "none", "sliding": "none"}):
        with pytest.raises(ValueError, match=text):
            TurbomindEngineConfig(kv_cache_format=layers, **given)
    with pytest.raises(ValueError, match=text):
        TurbomindEngineConfig(**given)
    if given.get("kv_quality") != "best" and "kv_calibration" not in given:
        only_sliding = {"default": "none", "sliding": "int4"}
        assert resolve(windows=MIXED, kv_cache_format=only_sliding, **given)
        with pytest.raises(ValueError, match=text):
            resolve(windows=FULL, kv_cache_format=only_sliding, **given)


def test_resolve_kv_options_16_bit_accepts_neutral_options():
    nothing = {"kv_rotation": False, "kv_scale_search": False, "kv_recent_tokens": -1}
    options = resolve(kv_quality="raw", kv_sink_tokens=0, **nothing)
    assert facts(options) == facts(resolve()) == ("raw", False, False, (0, -1))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kv_rotation": False}, ("balanced", False, True, (64, 64))),
        ({"kv_scale_search": False}, ("balanced", True, False, (64, 64))),
        ({"kv_sink_tokens": 0}, ("balanced", True, True, (0, 64))),
        ({"kv_recent_tokens": 128}, ("balanced", True, True, (64, 128))),
        ({"kv_recent_tokens": -1}, ("balanced", True, True, (0, -1))),
        ({"kv_recent_tokens": 0}, ("balanced", True, True, (64, 0))),
        ({"kv_quality": "raw", "kv_rotation": True}, ("raw", True, False, (0, -1))),
        ({"kv_quality": "raw", "kv_recent_tokens": 64}, ("raw", False, False, (0, 64))),
        ({"kv_quality": "raw", "kv_sink_tokens": 64}, ("raw", False, False, (64, 0))),
        ({"kv_quality": "raw", "kv_scale_search": True}, ("raw", False, True, (0, -1))),
    ],
)
def test_resolve_kv_options_each_option_overrides_one_setting(given, expected):
    assert facts(resolve(quant_policy="nvfp4", **given)) == expected


RAW_WINDOW = {"kv_quality": "raw", "kv_recent_tokens": 64}


@pytest.mark.parametrize(
    ("given", "k_bias", "expected"),
    [
        ({"quant_policy": 16}, False, (True, "int8")),
        ({"quant_policy": 4}, True, (True, "int8")),
        ({"quant_policy": 8}, False, (False, "16bit")),
        ({"quant_policy": 8}, True, (True, "16bit")),
        ({"quant_policy": 8, "kv_k_offset": "none"}, True, (False, "16bit")),
        ({"quant_policy": 8, "kv_quality": "balanced"}, False, (True, "16bit")),
        ({"quant_policy": 16, "kv_quality": "raw"}, False, (False, "16bit")),
        (
            {"quant_policy": 16, "kv_quality": "raw", "kv_k_offset": "block"},
            False,
            (False, "16bit"),
        ),
        ({"quant_policy": 16, **RAW_WINDOW}, False, (False, "16bit")),
        ({"quant_policy": 16, **RAW_WINDOW, "kv_k_offset": "block"}, False, (True, "16bit")),
        ({"quant_policy": 16, **RAW_WINDOW, "kv_window": "int8"}, False, (False, "int8")),
        ({"quant_policy": 16, "kv_window": "16bit"}, False, (True, "16bit")),
        ({"quant_policy": 16, "kv_recent_tokens": -1}, False, (False, "16bit")),
        ({"quant_policy": 16, "kv_recent_tokens": -1}, True, (True, "16bit")),
        ({"kv_cache_format": "k=none,v=nvfp4"}, False, (False, "int8")),
    ],
)
def test_resolve_kv_options_offset_and_window_follow_preset_and_bias(given, k_bias, expected):
    options = resolve_kv_options(TurbomindEngineConfig(**given), FULL, k_bias=k_bias)
    assert (options.k_offset, options.window) == expected


def test_kv_options_text_and_labels_describe_them():
    assert resolve(quant_policy=8).quality_text == "raw"
    text = resolve(quant_policy=4).quality_text
    window = "first 64 and newest 64+ tokens in int8"
    assert text == f"balanced (K rotation, K offset per block, {window})"
    options = resolve(quant_policy=16, kv_window="16bit", kv_k_offset="none")
    assert options.quality_text.endswith("scale search, first 64 and newest 64+ tokens in 16 bit)")
    options = resolve(quant_policy=16, kv_quality="best", kv_calibration="/a/b.safetensors")
    assert options.quality_text.endswith("in int8, calibration b.safetensors)")
    assert options.labels() == {
        "mode": "nvfp4",
        "quality": "best",
        "rotation": "true",
        "scale_search": "true",
        "k_offset": "block",
        "window": "int8",
        "sink_tokens": "64",
        "recent_tokens": "64",
        "calibration": "b.safetensors",
    }


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kv_quality": "good"}, r"kv_quality is 'good'. It must be one of .*best \(--kv-quality"),
        ({"kv_quality": ""}, "kv_quality is ''"),
        (
            {"kv_quality": "best", **INT4},
            r"kv_quality best needs a calibration file .--kv-calibration",
        ),
        (
            {"kv_calibration": "f", **INT4},
            r"kv_calibration .f. needs kv_quality best, but kv_quality is not given",
        ),
        (
            {"kv_calibration": "f", "kv_quality": "raw", **INT4},
            r"kv_quality is raw",
        ),
        ({"kv_calibration": "", "kv_quality": "best", **INT4}, r"kv_calibration is ''"),
        ({"kv_calibration": 3, "kv_quality": "best", **INT4}, r"kv_calibration is 3"),
        ({"kv_rotation": 1}, r"kv_rotation is 1. It must be True or False \(--kv-rotation"),
        ({"kv_scale_search": "on"}, "--kv-scale-search"),
        ({"kv_k_offset": "head"}, "kv_k_offset is 'head'. It must be one of .*--kv-k-offset"),
        ({"kv_window": 8}, "kv_window is 8. It must be one of .*--kv-window"),
        (
            {"kv_sink_tokens": 4},
            r"kv_sink_tokens is 4. It must be a multiple of 64 .*--kv-sink-tok",
        ),
        ({"kv_sink_tokens": -1}, "kv_sink_tokens is -1"),
        ({"kv_sink_tokens": 4160}, "kv_sink_tokens is 4160"),
        ({"kv_sink_tokens": True}, "kv_sink_tokens is True"),
        ({"kv_recent_tokens": 100}, r"kv_recent_tokens is 100. It must be .* or -1 \("),
        ({"kv_recent_tokens": -64}, "kv_recent_tokens is -64"),
        ({"kv_recent_tokens": 64.0}, "kv_recent_tokens is 64.0"),
        ({"kv_recent_tokens": -1, "kv_sink_tokens": 64}, r"kv_sink_tokens is 64. It must be 0"),
        ({"kv_cache_format": "fp3"}, r"kv_cache_format is 'fp3'. It must be k=NAME.*--kv-cache-f"),
        ({"kv_cache_format": 16}, "kv_cache_format is 16"),
        ({"kv_cache_format": ["fp8"] * 9}, "kv_cache_format is 'a list'"),
        ({"kv_cache_format": "k=fp8"}, "kv_cache_format is 'k=fp8'"),
        ({"kv_cache_format": "k=fp8,k=fp8"}, "kv_cache_format"),
        ({"kv_cache_format": "k=fp8,v=nvfp4,v=int4"}, "kv_cache_format"),
        ({"kv_cache_format": "/no/such/table.yaml"}, r"table\.yaml: No such file.*--kv-cache"),
        ({"kv_cache_format": {}}, "must be at least the entry 'default'"),
        ({"kv_cache_format": {"default": "fp3"}}, "entry 'default' is 'fp3'"),
        ({"kv_cache_format": {"half": "fp8"}}, r"entry is 'half'. It must be default, sliding"),
        ({"kv_cache_format": {"5-3": "fp8"}}, "is '5-3'"),
        ({"kv_cache_format": {True: "fp8"}}, "is 'True'"),
        ({"kv_cache_format": {"--1": "fp8"}}, "is '--1'"),
        ({"kv_cache_format": {"0-2": "fp8", 2: "int8"}}, "layer 2 twice"),
        ({"kv_cache_format": "fp8", "quant_policy": 16}, "quant_policy 16 contradicts .*'fp8'"),
        ({"kv_cache_format": "fp8", "quant_policy": "none"}, "quant_policy 'none' contradicts"),
    ],
)
def test_engine_config_invalid_kv_option_is_rejected(given, text):
    with pytest.raises(ValueError, match=text) as info:
        TurbomindEngineConfig(**given)
    assert "\n" not in str(info.value)


def test_engine_config_equal_formats_given_twice_are_accepted():
    config = TurbomindEngineConfig(quant_policy=8, kv_cache_format="INT8")
    assert config.kv_format == "int8"
    assert TurbomindEngineConfig(quant_policy=16, kv_cache_format="fp4").kv_format == "fp4"


def test_resolve_kv_options_formats_by_side_are_used():
    options = resolve(kv_cache_format="k=fp8_e4m3, v=nvfp4")
    assert options.layers == (FormatPair("fp8", "nvfp4"),) * 4
    assert (options.format, options.quality) == ("k=fp8,v=nvfp4", "balanced")
    assert resolve(kv_cache_format="k=fp4,v=fp4").format == "nvfp4"  # on the CPU, fp4 means nvfp4


def names(windows, table):
    return [str(pair) for pair in parse_cache_format(table).by_layer(windows)]


def test_parse_cache_format_table_gives_formats_by_layer():
    assert names(FULL, {"default": "nvfp4", 3: "fp8"}) == ["nvfp4"] * 3 + ["fp8"]
    assert names(MIXED, {"sliding": "int8", "full": "fp8"}) == ["fp8", "int8"] * 2
    table = {"default": "none", "sliding": "int8", "1-2": "k=fp8,v=nvfp4"}
    assert names(MIXED, table) == ["none", "k=fp8,v=nvfp4", "k=fp8,v=nvfp4", "int8"]
    assert names(FULL, {"0-3": "int4"}) == ["int4"] * 4


def test_parse_cache_format_layers_count_from_the_end():
    table = {"default": "int4", 0: "int8", -1: "fp8"}
    assert names(FULL, table) == ["int8", "int4", "int4", "fp8"]
    assert names(FULL, {"default": "int4", "-2--1": "fp8"}) == ["int4"] * 2 + ["fp8"] * 2
    assert names(FULL, {"0": "int8", "1--1": "fp8"}) == ["int8"] + ["fp8"] * 3
    assert names([0], {"0--1": "fp8"}) == ["fp8"]


@pytest.mark.parametrize("order", list(itertools.permutations(["default", "full", "1"])))
def test_parse_cache_format_order_of_entries_does_not_matter(order):
    table = {key: {"default": "int4", "full": "int8", "1": "fp8"}[key] for key in order}
    assert names(MIXED, table) == ["int8", "fp8", "int8", "int4"]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"default": "fp8", 4: "int8"}, "is 'layer 4'. It must be layers 0 to 3"),
        ({"default": "fp8", "2-9": "int8"}, "is 'layer 9'"),
        ({"default": "fp8", -5: "int8"}, "is 'layer -5'. It must be .* or -4 to -1"),
        ({"default": "fp8", 3: "int8", -1: "int4"}, "layer 3 twice"),
        ({"default": "fp8", "3--2": "int8"}, "is 'layers 3--2'"),
        ({"sliding": "fp8"}, "nothing for layer 0"),
        ({"0-2": "fp8"}, "nothing for layer 3"),
    ],
)
def test_resolve_kv_options_table_that_does_not_fit_the_model_is_rejected(table, text):
    with pytest.raises(ValueError, match=text):
        resolve(kv_cache_format=table)


def test_engine_config_yaml_table_is_read(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text("default: nvfp4  # four bits\n0: int8\n2-3: k=fp8,v=nvfp4\n")
    options = resolve(kv_cache_format=str(path))
    assert [str(pair) for pair in options.layers] == ["int8", "nvfp4"] + ["k=fp8,v=nvfp4"] * 2
    assert (options.format, options.quality, options.scale_search) == ("mixed", "balanced", True)
    assert TurbomindEngineConfig(kv_cache_format=str(path)).kv_format == "mixed"
    with pytest.raises(ValueError, match="contradicts kv_cache_format"):
        TurbomindEngineConfig(kv_cache_format=str(path), quant_policy="nvfp4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is 'an empty file'. It must be a table"),
        ("- fp8\n", "is 'a list'"),
        ("default: fp8\ndefault: int8\n", "an entry twice"),
        ("default: [fp8\n", "not YAML"),
        ("default: !!python/object/apply:os.system ['true']\n", "is 'a list'"),
        ("default: fp8\n3: int8\n03: int4\n", "layer 3 twice"),
        ("default: fp8\n0x3: int8\n", "entry is '0x3'"),
        ("default: fp8\n-1--2: int8\n", "entry is '-1--2'"),
        ("default: fp8\n<<: {0: int8}\n", "entry '<<' is 'a dict'"),
        ("default: {k: fp8}\n", "entry 'default' is 'a dict'"),
        ("? [1, 2]\n: fp8\n", "not YAML|must be default"),
        ("a: &a [x, x]\nb: &b [*a, *a]\ndefault: [*b, *b]\n", "entry 'a' is 'a list'"),
        ("\0", "not YAML"),
        ("[" * 60_000, "not YAML"),
    ],
)
def test_engine_config_malformed_yaml_is_rejected(tmp_path, text, message):
    path = tmp_path / "table.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as info:
        TurbomindEngineConfig(kv_cache_format=str(path))
    assert "\n" not in str(info.value) and len(str(info.value)) < 1000


def test_parse_cache_format_yaml_layer_numbers_are_decimal(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text("default: fp8\n010: int8\n")  # YAML 1.1 reads 010 as 8
    layers = parse_cache_format(path).by_layer([0] * 12)
    assert [i for i, pair in enumerate(layers) if pair.k == "int8"] == [10]


def test_engine_config_huge_yaml_is_rejected(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text("#" * (MAX_TABLE_BYTES + 1))
    with pytest.raises(ValueError, match=f"must be at most {MAX_TABLE_BYTES} bytes") as info:
        TurbomindEngineConfig(kv_cache_format=str(path))
    assert str(info.value).count("--kv-cache-format") == 1


def test_engine_config_folder_as_table_is_rejected(tmp_path):
    path = tmp_path / "table.yaml"
    path.mkdir()
    with pytest.raises(ValueError, match="must be a regular file"):
        TurbomindEngineConfig(kv_cache_format=path)


def applied(options):
    engine_config = SimpleNamespace(calibrations=[])
    apply_kv_options(options, engine_config, model=SimpleNamespace())
    return engine_config


def test_apply_kv_options_sets_engine_config():
    engine_config = applied(resolve(quant_policy=16, kv_recent_tokens=128))
    assert (engine_config.kv_format, engine_config.kv_rotate_k, engine_config.kv_search_scales) == (
        "nvfp4",
        True,
        True,
    )
    assert (engine_config.kv_sink_tokens, engine_config.kv_recent_tokens) == (64, 128)
    assert not hasattr(engine_config, "kv_layers")
    engine_config = applied(resolve(quant_policy=8))
    assert (
        engine_config.kv_rotate_k,
        engine_config.kv_sink_tokens,
        engine_config.kv_recent_tokens,
    ) == (False, 0, -1)
    engine_config = applied(resolve(kv_cache_format="k=fp8,v=nvfp4"))
    assert engine_config.kv_layers == [("fp8", "nvfp4")] * 4


UNLISTED = [
    *("k=fp8_e5m2,v=fp8", "k=fp8,v=fp8_e5m2", "k=int4,v=int8", "k=fp8_e5m2,v=nvfp4"),
    *("k=nvfp4,v=mxfp4", "k=fp4,v=int8", "k=fp8_e5m2,v=fp4", "k=fp8,v=auto"),
]
LISTED = [
    *("k=none,v=nvfp4", "k=int8,v=int4", "k=fp8,v=fp4", "k=bf16,v=fp4_e2m1", "k=fp4,v=fp4_e2m1"),
    *("k=fp4,v=nvfp4", "k=mxfp4,v=fp4"),  # the device chooses the format
]


@pytest.mark.parametrize("pair", UNLISTED)
def test_engine_config_pair_without_kernels_is_rejected(pair):
    wanted = r"one format for both, or none, int8.* for K with nvfp4, int4.* for V"
    for given in (pair, {"default": "none", 3: pair}):
        with pytest.raises(ValueError, match=rf"^kv_cache_format is k=.* It must be {wanted}"):
            TurbomindEngineConfig(kv_cache_format=given)


@pytest.mark.parametrize("pair", LISTED)
def test_engine_config_supported_pair_is_accepted(pair):
    assert TurbomindEngineConfig(kv_cache_format=pair).kv_table.default is not None


@pytest.mark.parametrize(
    ("name", "format_name"),
    [("fp4_e2m1", "fp4"), ("auto", "none"), ("bf16", "none"), ("BFloat16", "none")],
)
def test_engine_config_names_of_other_engines_are_accepted(name, format_name):
    assert TurbomindEngineConfig(quant_policy=name).kv_format == format_name
    assert TurbomindEngineConfig(kv_cache_format=name).kv_format == format_name
    assert TurbomindEngineConfig(kv_cache_format={"default": name}).kv_format == format_name
    assert parse("--kv-cache-dtype", name).kv_format == format_name
    assert parse("--quant-policy", name).kv_format == format_name


def parse(*flags):
    return engine_config(make_parser().parse_args(["serve", "api_server", "smollm2", *flags]))


def test_kv_flags_reach_the_config():
    config = parse(
        *("--kv-cache-format", "k=fp8,v=nvfp4", "--kv-quality", "best", "--kv-calibration", "f"),
        *("--no-kv-rotation", "--kv-scale-search", "--kv-sink-tokens", "128"),
        *("--kv-recent-tokens", "-1", "--kv-sink-tokens", "0"),
    )
    assert (config.kv_quality, config.kv_calibration) == ("best", "f")
    assert (config.kv_rotation, config.kv_scale_search) == (False, True)
    assert (config.kv_sink_tokens, config.kv_recent_tokens) == (0, -1)
    assert config.kv_format == "k=fp8,v=nvfp4"
    config = parse()
    assert (config.kv_quality, config.kv_rotation, config.kv_format) == (None, None, "none")
    assert parse("--quant-policy", "0").kv_format == "none"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--kv-quality", "good"], "--kv-quality"),
        (["--quant-policy", "4", "--kv-quality", "best"], "--kv-calibration"),
        (["--quant-policy", "0", "--kv-quality", "best", "--kv-calibration", "/x"], "no effect"),
        (["--kv-rotation"], "Remove --kv-rotation"),
        (["--kv-sink-tokens", "5"], "--kv-sink-tokens"),
        (["--kv-sink-tokens", "many"], "--kv-sink-tokens"),
        (["--kv-cache-format", "fp8", "--quant-policy", "0"], "quant_policy '0' contradicts"),
        (["--kv-cache-format", "no.yaml"], "no.yaml"),
    ],
)
def test_api_server_invalid_kv_flag_is_a_one_line_error(capsys, flags, text):
    with pytest.raises(SystemExit) as info:
        main(["serve", "api_server", "smollm2", *flags])
    assert info.value.code == 2
    message = capsys.readouterr().err
    assert text in message and message.count("\n") == 1

"""Tests of the command line: an error names the flag in one line, with exit status 2."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import make_parts

from lmdeploy import GenerationConfig, TurbomindEngineConfig
from lmdeploy.cli.engine_flags import FLAGS_WITHOUT_EFFECT, UNSUPPORTED_FLAGS, engine_config
from lmdeploy.cli.main import main, make_parser
from lmdeploy.cli.serve import api_keys
from lmdeploy.config.generation import sampling_defaults
from lmdeploy.engine.kv_quality import DEFAULT_WINDOW16_TOKENS
from lmdeploy.serve import server
from lmdeploy.serve.sampling import read_sampling
from lmdeploy.serve.state import ServerOptions

ROOT = Path(__file__).resolve().parents[3]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w-])")
OF_OTHERS = {"--force-reinstall", "--no-deps", "--merge"}  # pip, llama-gguf-split


def parse(*flags):
    return make_parser().parse_args(["serve", "api_server", "smollm2", *flags])


def refused(capsys, *flags, command=("serve", "api_server", "smollm2")):
    with pytest.raises(SystemExit) as info:
        main([*command, *flags])
    assert info.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "Traceback" not in text
    return text


@pytest.mark.parametrize("flag", UNSUPPORTED_FLAGS)
def test_unsupported_flag_accepts_only_its_neutral_values(capsys, flag):
    count, accepted = UNSUPPORTED_FLAGS[flag]
    values = [] if count == 0 else ["other"]
    assert f"{flag}" in refused(capsys, flag, *values)
    for value in accepted:
        parse(flag, value)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tp", "2"], "--tp 2 is not supported"),
        (["--tp=2"], "--tp 2 is not supported"),
        (["--model-format", "nova"], "model_format is 'nova'"),
        (["--quant-policy", "5"], "quant_policy is '5'"),
        (["--quant-policy", "12"], "quant_policy is '12'"),
        (["--quant-policy", "fp3"], "quant_policy is 'fp3'"),
        (["--session-len", "0"], "session_len is 0"),
        (["--session-len", "-1"], "session_len is -1"),
        (["--session-len", "many"], "--session-len"),
        (["--max-batch-size", "0"], "max_batch_size is 0"),
        (["--cache-max-entry-count", "0"], "cache_max_entry_count is 0"),
        (["--cache-max-entry-count", "nan"], "cache_max_entry_count is nan"),
        (["--cache-block-seq-len", "48"], "--cache-block-seq-len"),
        (["--max-prefill-token-num", "-3"], "max_prefill_token_num is -3"),
        (["--server-port", "70000"], "server_port is 70000"),
        (["--dry-run", "--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--dry-run", "--api-keys", " a"], "--api-keys"),
        (["--api-keys"], "--api-keys needs at least one key"),
        (["--hf-overrides", "{"], "--hf-overrides: '{' is not a JSON object"),
        (["--hf-overrides", "[1]"], "--hf-overrides: '[1]' is not a JSON object"),
        (["--revision", ""], "revision is ''"),
        (["--rope-scaling-factor", "-1"], "rope_scaling_factor is -1.0"),
        (["--proxy-url", "file:///etc/passwd"], "proxy_url is 'file:///etc/passwd'"),
        (["--generation-config", "/no/such/file"], "generation_config is '/no/such/file'"),
        (["--device", "npu"], "--device"),
        (["--devices", "1", "--device", "cpu"], "devices cannot be used with device_type cpu"),
        (["--exact", "--device", "cuda"], "exact is not supported on CUDA"),
        (["--chat-template", "/no/such/file.jinja"], "--chat-template"),
        (["--chat-template", "{"], "--chat-template"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag\n"),
        (["--quant-polcy", "16"], "arguments: --quant-polcy 16; did you mean --quant-policy?"),
        (["--quant-polcy=16"], "did you mean --quant-policy?"),
        (["--server-prt", "1"], "did you mean --server-port?"),
        (["--server_port", "1"], "did you mean --server-port?"),
        (["-server-port", "1"], "did you mean --server-port?"),
        (["--port", "1"], "did you mean --server-port?"),
        (["--cache-max", "1"], "did you mean --cache-max-entry-count?"),
        (["--api-key", "1", "--SSL"], "did you mean --api-keys, --ssl?"),
        (["--session", "1"], "did you mean --session-len?"),
        (["--enable-metrics"], "unrecognized arguments: --enable-metrics\n"),
        (["--h"], "did you mean -h?"),
        (["--", "--x"], "unrecognized arguments"),
        (["--session", "5"], "--session"),
    ],
)
def test_api_server_invalid_flag_is_named_in_the_error(capsys, flags, text):
    assert text in refused(capsys, *flags)


@pytest.mark.parametrize("flag", FLAGS_WITHOUT_EFFECT)
def test_flag_without_effect_is_accepted_and_described(capsys, flag):
    assert engine_config(parse(flag)) == engine_config(parse())
    assert engine_config(make_parser().parse_args(["chat", "m", flag])) == engine_config(parse())
    with pytest.raises(SystemExit):
        main(["serve", "api_server", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"{flag} no effect: {FLAGS_WITHOUT_EFFECT[flag]}" in text


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from flags_of(child)


def texts(path: Path) -> Iterator[str]:
    """Yield the string literals of a source file."""
    source = path.read_text("utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    else:
        yield from re.findall(r"""("[^"\n]*"|'[^'\n]*'|`[^`]*`)""", source)


def test_flags_in_texts_of_the_source_exist():
    known = {*flags_of(make_parser()), *OF_OTHERS}
    paths = [*(ROOT / "lmdeploy").rglob("*.py"), *(ROOT / "lmdeploy/serve/web").glob("*.js")]
    paths += [path for path in (ROOT / "src").rglob("*") if path.suffix in (".cc", ".cu", ".h")]
    named = [
        (path.name, flag) for path in paths for text in texts(path) for flag in FLAG.findall(text)
    ]
    assert len({flag for _, flag in named}) > 50
    assert [(name, flag) for name, flag in named if flag not in known] == []


@pytest.mark.parametrize("options", [TurbomindEngineConfig, GenerationConfig])
def test_flags_in_errors_of_options_exist(options):
    known = set(flags_of(make_parser()))
    for field in dataclasses.fields(options):
        for value in (object(), -7, "", [], {"x": object()}):
            try:
                options(**{field.name: value})
            except ValueError as error:
                assert [flag for flag in FLAG.findall(str(error)) if flag not in known] == []


def test_main_invalid_command_lists_the_valid_ones(capsys):
    assert "needs a command: chat, serve, lite, kv-store, check_env." in refused(capsys, command=())
    assert "lmdeploy serve needs" in (text := refused(capsys, command=("serve",)))
    assert "a command: api_server, ray." in text
    assert "calibrate, kv-search, kv-report" in refused(capsys, command=("lite",))
    text = refused(capsys, command=("serve", "smollm2"))
    assert "lmdeploy serve has no command 'smollm2'. The commands are api_server, ray." in text
    assert "Did you mean lmdeploy serve api_server smollm2?" in text
    text = refused(capsys, command=("org/model", "--quant-policy", "16"))
    assert "lmdeploy chat org/model or lmdeploy serve api_server org/model?" in text
    assert "mean lmdeploy serve api_server?" in refused(capsys, command=("serve", "api-server"))
    assert "mean lmdeploy serve api_server?" in refused(capsys, command=("api_server", "smollm2"))
    assert "mean lmdeploy lite calibrate?" in refused(capsys, command=("lite", "calibrat", "x"))


def test_api_server_help_shows_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "api_server", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count(f"(balanced, best: {DEFAULT_WINDOW16_TOKENS})") == 2
    assert text.count("CORS: ") == 4 and "also shows tracebacks" in text
    assert "generation_config.json" in text  # a file, not the flag of that name


def test_speculative_config_of_vllm_sets_both_flags():
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    config = engine_config(parse("--speculative-config", text))
    assert (config.speculative_algorithm, config.speculative_num_draft_tokens) == ("ngram", 5)
    config = engine_config(parse("--speculative-config", '{"model": "m"}'))
    assert (config.speculative_algorithm, config.speculative_draft_model) == ("draft_model", "m")
    assert engine_config(parse("--speculative-draft-model", "m")).speculative_draft_model == "m"
    config = engine_config(parse("--speculative-config", '{"method": "ngram"}'))
    assert (config.speculative_algorithm, config.speculative_num_draft_tokens) == ("ngram", 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"method": "eagle3"}',
            "--speculative-config: its method is 'eagle3'. It must be none or",
        ),
        ('{"method": ["ngram"]}', "its method is ['ngram']"),
        ('{"num_speculative_tokens": 3}', "its method is None"),
        ('{"method": "ngram", "model": "m"}', "ngram excludes speculative_draft_model"),
        ('{"method": "draft_model"}', "draft_model needs speculative_draft_model"),
        ('{"model": 3}', "speculative_draft_model is 3"),
        ('{"method": "ngram", "top": 1}', "it has no field 'top'."),
        ('{"method": "ngram", "num_speculative_tokens": "many"}', "speculative_num_draft_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "--speculative-num-draft-tokens"),
        ("[1]", "JSON"),
    ],
)
def test_wrong_speculative_config_is_refused(capsys, text, message):
    assert message in refused(capsys, "--speculative-config", text)


def test_engine_config_takes_values_of_flags():
    config = engine_config(
        parse(
            *("--quant-policy", "16", "--session-len", "4096", "--max-batch-size", "4"),
            *("--cache-max-entry-count", "100", "--cache-block-seq-len", "32"),
            *("--disable-prefix-caching", "--num-threads", "3", "--deterministic"),
            "--strict-arch",
            *("--revision", "v1", "--download-dir", "/d", "--rope-scaling-factor", "2"),
            *("--hf-overrides", '{"rope_theta": 5e5}'),
        )
    )
    assert (config.revision, config.download_dir) == ("v1", "/d")
    assert (config.rope_scaling_factor, config.hf_overrides) == (2.0, {"rope_theta": 5e5})
    assert (config.kv_format, config.session_len, config.max_batch_size) == ("fp4", 4096, 4)
    assert (config.cache_max_entry_count, config.cache_block_seq_len) == (100, 32)
    assert not config.enable_prefix_caching and config.deterministic and config.strict_arch
    assert engine_config(parse()).enable_prefix_caching and not engine_config(parse()).strict_arch
    args = parse()
    assert (args.server_name, args.server_port) == ("127.0.0.1", 23333)


def test_api_server_flags_reach_run_server(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(server, "run_server", lambda *_, options, **__: seen.append(options) or 3)
    flags = (
        "--shutdown-timeout",
        "60",
        "--enable-abort-handling",
        "--max-concurrent-requests",
        "8",
    )
    assert main(["serve", "api_server", "smollm2", *flags]) == 3  # what run_server returns
    assert seen[0].max_concurrent_requests == 8
    assert (seen[0].shutdown_timeout, seen[0].enable_abort_handling) == (60, True)
    monkeypatch.undo()
    text = refused(capsys, "--shutdown-timeout", "-1", command=("serve", "api_server", "smollm2"))
    assert "--shutdown-timeout" in text
    text = refused(
        capsys, "--max-concurrent-requests", "0", command=("serve", "api_server", "smollm2")
    )
    assert "--max-concurrent-requests" in text


def test_api_server_missing_model_is_named_in_the_error(capsys):
    text = refused(capsys, "--server-port", "0", command=("serve", "api_server", "/no/such/model"))
    assert "/no/such/model" in text


def test_api_keys_come_from_the_flag_or_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api_keys(None) == []
    monkeypatch.setenv("LMDEPLOY_API_KEYS", " first second\n")
    assert api_keys(None) == ["first", "second"]
    assert api_keys(["flag"]) == ["flag"]
    monkeypatch.setenv("LMDEPLOY_API_KEYS", " ")
    assert "LMDEPLOY_API_KEYS needs at least one key" in refused(capsys, "--dry-run")
    assert "--api-keys needs at least one key" in refused(capsys, "--dry-run", "--api-keys", "")


def test_api_key_of_the_environment_reaches_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerOptions] = []
    monkeypatch.setenv("LMDEPLOY_API_KEYS", "secret")
    monkeypatch.setattr(server, "run_server", lambda *_, options, **__: seen.append(options) or 0)
    assert main(["serve", "api_server", "smollm2"]) == 0
    assert seen[0].api_keys == ["secret"]


@pytest.mark.parametrize("name", ["none", "lmdeploy", "vllm"])
def test_generation_config_name_means_that_the_models_own_is_not_read(name: str) -> None:
    assert parse("--generation-config", name).generation_config == name
    assert read_sampling(name) == sampling_defaults({})
    assert read_sampling("auto") is None


def test_api_server_hub_address_is_served_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import lmdeploy.engine.load as load

    names: list[str] = []
    monkeypatch.setattr(load, "load_engine", lambda *_, **__: make_parts())
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    monkeypatch.setattr(
        server, "format_line", lambda _, options: names.append(options.model_name) or ""
    )
    for address in ("https://huggingface.co/owner/name/tree/main", "owner/name"):
        main(["serve", "api_server", address, "--server-port", "0"])
    assert names == ["owner/name"] * 2

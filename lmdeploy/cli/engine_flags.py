"""The flags of the engine. Other flags of LMDeploy are rejected by name."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from lmdeploy.base.logs import LOG_LEVELS
from lmdeploy.config.engine import (
    BLOCK_LENGTHS,
    DEVICE_TYPES,
    DTYPES,
    MAX_DRAFT_TOKENS,
    SPECULATIVE_ALGORITHMS,
    TurbomindEngineConfig,
)
from lmdeploy.config.kv_format_options import (
    KV_K_OFFSETS,
    KV_QUALITIES,
    KV_WINDOWS,
    describe_policies,
)
from lmdeploy.config.unsupported import unsupported_flags

UNSUPPORTED_FLAGS = unsupported_flags()
FLAGS_WITHOUT_EFFECT = {
    "--eager-mode": "results with CUDA graphs and without are the same",
    "--language-model-only": "of a vision checkpoint, only the text part is loaded",
    "--disable-vision-encoder": "of a vision checkpoint, only the text part is loaded",
    "--trust-remote-code": "code of a checkpoint is never run",
}
_MIN_BEGINNING = 5  # characters, dashes included
_MAX_SUGGESTIONS = 3


class OneLineParser(argparse.ArgumentParser):
    """Reports errors in one line with exit status 2, and accepts no abbreviated flags."""

    model_commands: Sequence[str] = ()  # those that a user may forget before a model

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse `args` and reject unknown ones here, where the command's flags are known."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit. If a command is missing, print the list of commands."""
        for action in self._actions:  # argparse has no public API for a parser's commands
            is_commands = isinstance(action, argparse._SubParsersAction)
            if is_commands and message.endswith(f"are required: {action.metavar}"):
                names = ", ".join(action.choices or ())
                fail(f"{self.prog} needs a command: {names}. --help describes them.")
        fail(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a choice. argparse has no public hook for the message about a wrong command."""
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
            return
        name = " ".join(str(value).split())[:80]
        near = difflib.get_close_matches(name, action.choices, n=1)
        nested = [
            f"{self.prog} {command} {name}"
            for command, parser in action.choices.items()
            for child in parser._actions
            if isinstance(child, argparse._SubParsersAction) and name in child.choices
        ]
        models = [f"{self.prog} {command} {name}" for command in self.model_commands]
        hints = nested or [f"{self.prog} {match}" for match in near] or models
        hint = f" Did you mean {' or '.join(hints)}?" if hints else ""
        commands = ", ".join(action.choices)
        self.error(f"{self.prog} has no command {name!r}. The commands are {commands}.{hint}")

    def _suggestion(self, unknown: Sequence[str]) -> str:
        flags = [
            flag
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for flag in action.option_strings
        ]
        given = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        near = [" or ".join(found) for text in given if (found := similar_flags(text, flags))]
        return f"; did you mean {', '.join(near)}?" if near else ""


def similar_flags(text: str, flags: Sequence[str]) -> list[str]:
    """Return the flags that begin with the text, contain its words, or are spelled like it."""
    given = "--" + text.strip("-").lower().replace("_", "-")
    words = set(given.split("-"))
    found: list[str] = []
    if len(given) >= _MIN_BEGINNING:
        found = [flag for flag in flags if flag.startswith(given)]
        found = found or [flag for flag in flags if words <= set(flag.split("-"))]
    if not 0 < len(found) <= _MAX_SUGGESTIONS:
        found = difflib.get_close_matches(given, flags, n=1)
    return [flag for flag in found if not _are_opposed(given, flag)]


def _are_opposed(first: str, second: str) -> bool:
    words = {flag.lstrip("-").partition("-")[0] for flag in (first, second)}
    return words == {"enable", "disable"}


def fail(message: str, status: int = 2) -> NoReturn:
    """Print `message` as one line to stderr and exit."""
    print("lmdeploy: error: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(status)


class _Refuse(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.dest
        accepted = UNSUPPORTED_FLAGS[flag][1]
        given = [str(value) for value in values] if values else []
        if len(given) == 1 and given[0] in accepted:
            return
        shown = " ".join([flag, *given])[:120]
        wanted = f" or set it to its default, {accepted[0]}" if accepted else ""
        parser.error(f"{shown} is not supported. Remove it{wanted}.")


def add_flags_without_effect(
    parser: argparse.ArgumentParser, flags: Iterable[str] = FLAGS_WITHOUT_EFFECT
) -> None:
    """Add switches of LMDeploy that describe what this package does anyway."""
    group = parser.add_argument_group("without effect")
    for flag in flags:
        reason = FLAGS_WITHOUT_EFFECT[flag]
        group.add_argument(
            flag, action="store_true", default=argparse.SUPPRESS, help=f"no effect: {reason}"
        )


def add_unsupported(parser: argparse.ArgumentParser) -> None:
    """Add the flags of LMDeploy that are not supported, hidden from the help text."""
    for flag, (count, _) in UNSUPPORTED_FLAGS.items():
        parser.add_argument(
            flag, nargs=count, action=_Refuse, help=argparse.SUPPRESS, default=argparse.SUPPRESS
        )


def _strict_number(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> int | float:
        return kind(text)

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


_INT = _strict_number(int)
_FLOAT = _strict_number(float)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add the flag --log-level."""
    parser.add_argument(
        "--log-level",
        default="WARNING",
        choices=LOG_LEVELS,
        help="lowest level of the messages of lmdeploy; DEBUG also shows tracebacks (default: "
        "%(default)s)",
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of TurbomindEngineConfig."""
    default = TurbomindEngineConfig()
    group = parser.add_argument_group("engine")

    def add(flag: str, text: str, **options: Any) -> None:
        group.add_argument(flag, help=text, **options)

    add(
        "--dtype",
        "data type of 16-bit K and V (default: auto, chosen by the weights)",
        choices=DTYPES,
        default="auto",
    )
    add(
        "--model-format",
        "reject checkpoints of any other format: hf, gguf, or a method such as awq",
        default=None,
    )
    _add_model_flags(group)
    add(
        "--device",
        "where to compute; auto chooses a GPU if one is usable (default: auto)",
        choices=DEVICE_TYPES,
        default="auto",
    )
    add("--devices", "index of the GPU (default: 0)", type=_INT)
    add(
        "--num-threads",
        "worker threads (default: all usable cores; with a GPU, at most 16)",
        type=_INT,
    )
    add(
        "--session-len",
        "most tokens of a prompt plus its response (default: the model's own limit)",
        type=_INT,
    )
    add(
        "--max-batch-size",
        "most sequences in one step (default: 32 on CPU, 128 on CUDA)",
        type=_INT,
    )
    add(
        "--cache-max-entry-count",
        "size of the KV cache: below 1, its share of the free memory; otherwise, the number of "
        "blocks without the 16-bit blocks (default: %(default)s)",
        type=_FLOAT,
        default=default.cache_max_entry_count,
    )
    add(
        "--cache-block-seq-len",
        "tokens in a block (default: %(default)s)",
        type=_INT,
        choices=BLOCK_LENGTHS,
        default=default.cache_block_seq_len,
    )
    add(
        "--quant-policy",
        f"KV format: {describe_policies()}. The default is 0. LMDeploy's PyTorch engine uses 16 "
        "for FP8.",
        default=default.quant_policy,
    )
    add_kv_flags(group)
    add(
        "--max-prefill-token-num",
        "most new tokens in one step (default: 256 on CPU, 8192 on CUDA, or --max-batch-size if "
        "that is more)",
        type=_INT,
    )
    _add_execution_flags(group)


def _add_model_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of weights, of downloads and of changes to a model's config."""
    group.add_argument(
        "--weight-format",
        metavar="FORMAT",
        help="quantize F32, F16 and BF16 matrices when they are loaded: int8, int4, or by part, as "
        "in attn=int8,mlp=int4,other=int8 (default: keep them as stored)",
    )
    group.add_argument(
        "--gemm-input-dtype",
        metavar="TYPE",
        help="int8 rounds the activations that are multiplied with quantized matrices to 8 bits, "
        "which is faster and less accurate; CPU only (default: 16 bits, and less on AVX-512 and "
        "AMX without --deterministic)",
    )
    group.add_argument(
        "--revision", help="branch, tag or commit of a hub id (default: its main branch)"
    )
    group.add_argument(
        "--download-dir",
        metavar="FOLDER",
        help="folder for downloads from the hub (default: the one of huggingface_hub)",
    )
    group.add_argument(
        "--hf-overrides",
        type=_json_object,
        metavar="JSON",
        help="values that replace those of config.json, as a JSON object; objects are merged",
    )
    group.add_argument(
        "--rope-scaling-factor",
        type=_FLOAT,
        default=0.0,
        help="replace the model's RoPE by dynamic NTK scaling with this factor (default: 0, the "
        "model's own RoPE)",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a JSON object")
    return value


class _SpeculativeConfig(argparse.Action):
    """Sets the flags of speculative decoding from vLLM's JSON."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the flags. The method may be missing with a model, and the length always."""
        method = values.get("method", "draft_model" if "model" in values else None)
        if method not in SPECULATIVE_ALGORITHMS:
            raise argparse.ArgumentError(
                self, f"its method is {method!r}. It must be {' or '.join(SPECULATIVE_ALGORITHMS)}."
            )
        # vLLM searches for the last 2 to 5 tokens by default. Here the longest match wins.
        ignored = {"method", "prompt_lookup_max", "prompt_lookup_min"}
        unknown = sorted(values.keys() - ignored - {"num_speculative_tokens", "model"})
        if unknown:
            raise argparse.ArgumentError(self, f"it has no field {unknown[0]!r}.")
        namespace.speculative_algorithm = method
        if "model" in values:
            namespace.speculative_draft_model = values["model"]
        if "num_speculative_tokens" in values:
            namespace.speculative_num_draft_tokens = values["num_speculative_tokens"]


def _add_execution_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of prefix caching, metrics and exactness."""
    caching = group.add_mutually_exclusive_group()
    caching.add_argument(
        "--enable-prefix-caching",
        action="store_true",
        default=True,
        help="reuse the blocks of equal prompt beginnings (default: on)",
    )
    caching.add_argument(
        "--disable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="do not reuse blocks",
    )
    group.add_argument(
        "--speculative-algorithm",
        choices=SPECULATIVE_ALGORITHMS,
        default=TurbomindEngineConfig.speculative_algorithm,
        help="ngram copies drafts of the next tokens from earlier places of the text and computes "
        "several tokens in one step; the answer does not change (default: ngram on CPU, none on "
        "CUDA)",
    )
    group.add_argument(
        "--speculative-draft-model",
        default=None,
        metavar="MODEL",
        help="a smaller model with the same vocabulary that computes the drafts",
    )
    group.add_argument(
        "--speculative-num-draft-tokens",
        type=int,
        default=TurbomindEngineConfig.speculative_num_draft_tokens,
        metavar="N",
        help=f"maximum length of a draft, 1 to {MAX_DRAFT_TOKENS} (default: %(default)s)",
    )
    group.add_argument(
        "--speculative-config",
        action=_SpeculativeConfig,
        type=_json_object,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help='these flags as vLLM writes them, such as {"method": "ngram", '
        '"num_speculative_tokens": 8} or {"model": "MODEL"}',
    )
    for flag, text in (
        ("--disable-metrics", "disable the endpoint /metrics"),
        ("--deterministic", "compute bit-equal results for every batch and number of threads"),
        ("--exact", "compute in FP32, for comparisons (CPU only)"),
        ("--strict-arch", "reject NVFP4 on GPUs without FP4 instructions (CUDA only)"),
    ):
        group.add_argument(flag, help=text, action="store_true")


def add_kv_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of the KV formats by layer and of the KV quality."""

    def add(flag: str, text: str, **options: Any) -> None:
        group.add_argument(flag, help=text, **options)

    group.add_argument(
        "--kv-cache-format",
        "--kv-cache-dtype",
        help="KV formats, instead of --quant-policy: one format, formats of K and V such as "
        "k=fp8,v=nvfp4, or a YAML file with formats by layer",
    )
    add(
        "--kv-quality",
        "preset of the KV cache (default: balanced for four-bit formats, else raw)",
        choices=KV_QUALITIES,
    )
    add(
        "--kv-store",
        "store of KV blocks, so that prompts survive a restart and servers share them: "
        "file:///folder?size=10GiB, redis://host:6379/0 or valkey://host:6379/0",
        metavar="URL",
    )
    add(
        "--kv-store-key",
        "file with the secret of the store (default: LMDEPLOY_KV_STORE_KEY, or a new file beside "
        "the folder)",
        metavar="FILE",
    )
    add(
        "--kv-events-config",
        "publish the changes of the prefix cache for routers, as vLLM does; a JSON object such as "
        '{"endpoint": "tcp://127.0.0.1:5557"} (default: off)',
        metavar="JSON",
    )
    add("--kv-calibration", "file from `lmdeploy lite calibrate`, required for --kv-quality best")
    add_kv_ingredient_flags(group)


def add_kv_ingredient_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags that override one ingredient of the preset each."""

    def add(flag: str, text: str, **options: Any) -> None:
        group.add_argument(flag, help=text, **options)

    switch: Any = argparse.BooleanOptionalAction
    add("--kv-rotation", "rotate K and Q by a Hadamard matrix", action=switch)
    add(
        "--kv-scale-search",
        "choose the FP4 scales with the smallest quantization error",
        action=switch,
    )
    add(
        "--kv-k-offset",
        "block subtracts the mean of a block's keys before they are quantized (balanced, best: "
        "block)",
        choices=KV_K_OFFSETS,
    )
    add(
        "--kv-window",
        "format of the first and newest tokens (balanced, best: int8 with 4-bit formats)",
        choices=KV_WINDOWS,
    )
    add(
        "--kv-sink-tokens",
        "number of first tokens kept in the window, a multiple of 64 (balanced, best: 64)",
        type=_INT,
    )
    add(
        "--kv-recent-tokens",
        "number of tokens before the current block kept in the window, a multiple of 64; -1 "
        "disables the window (balanced, best: 64)",
        type=_INT,
    )


KV_INGREDIENTS = (
    "kv_rotation",
    "kv_scale_search",
    "kv_k_offset",
    "kv_window",
    "kv_sink_tokens",
    "kv_recent_tokens",
)


def kv_ingredients(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of TurbomindEngineConfig that add_kv_ingredient_flags sets."""
    return {name: getattr(args, name) for name in KV_INGREDIENTS}


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the model path and the flags of every command that runs a model."""
    parser.add_argument("model_path", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument(
        "--chat-template",
        default=None,
        help="chat template: a .jinja file, a JSON file or JSON text (default: the model's own)",
    )
    add_log_level(parser)
    add_engine_flags(parser)
    add_flags_without_effect(parser)
    add_unsupported(parser)


def engine_config(args: argparse.Namespace) -> TurbomindEngineConfig:
    """Return the engine's options from parsed flags. Raise ValueError for a wrong value."""
    return TurbomindEngineConfig(
        dtype=args.dtype,
        model_format=args.model_format,
        weight_format=args.weight_format,
        gemm_input_dtype=args.gemm_input_dtype,
        revision=args.revision,
        download_dir=args.download_dir,
        hf_overrides=args.hf_overrides,
        rope_scaling_factor=args.rope_scaling_factor,
        session_len=args.session_len,
        max_batch_size=args.max_batch_size,
        cache_max_entry_count=args.cache_max_entry_count,
        cache_block_seq_len=args.cache_block_seq_len,
        enable_prefix_caching=args.enable_prefix_caching,
        speculative_algorithm=args.speculative_algorithm,
        speculative_draft_model=args.speculative_draft_model,
        speculative_num_draft_tokens=args.speculative_num_draft_tokens,
        quant_policy=args.quant_policy,
        max_prefill_token_num=args.max_prefill_token_num,
        enable_metrics=not args.disable_metrics,
        device_type=args.device,
        devices=None if args.devices is None else [args.devices],
        num_threads=args.num_threads,
        deterministic=args.deterministic,
        exact=args.exact,
        strict_arch=args.strict_arch,
        kv_cache_format=args.kv_cache_format,
        kv_quality=args.kv_quality,
        kv_calibration=args.kv_calibration,
        kv_store=args.kv_store,
        kv_store_key=args.kv_store_key,
        kv_events_config=args.kv_events_config,
        **kv_ingredients(args),
    )

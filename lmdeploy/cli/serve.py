"""`lmdeploy serve api_server`: starts the HTTP server or prints its memory plan."""

from __future__ import annotations

import argparse
import os
import signal
from threading import Thread
from typing import TYPE_CHECKING

from lmdeploy.base.checks import OptionError
from lmdeploy.cli.engine_flags import engine_config
from lmdeploy.cli.option_flags import flag_values
from lmdeploy.config.chat_template import parse_chat_template
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.serve.state import ServerOptions

if TYPE_CHECKING:
    from lmdeploy.engine.model_files import ModelInfo


def run_api_server(args: argparse.Namespace) -> int:
    """Serve until interrupted, or print the memory plan with --dry-run. Return the exit status."""
    from lmdeploy.serve import server

    config = engine_config(args)
    template = parse_chat_template(args.chat_template)
    options = server_options(args)
    server.check_options(options)
    if args.dry_run:
        return print_plan(args.model_path, config)
    return server.run_server(
        args.model_path, config, chat_template_config=template, options=options
    )


def run_ray(args: argparse.Namespace) -> int:
    """Serve with replicas on Ray until interrupted. Return the exit status."""
    from lmdeploy.checkpoint.hub import hub_address
    from lmdeploy.engine.core import StartedCore
    from lmdeploy.replicas.deploy import Replicas
    from lmdeploy.replicas.options import ReplicaOptions
    from lmdeploy.serve import server

    config = engine_config(args)
    if config.kv_events is not None and args.num_replicas > 1:
        raise OptionError(
            "kv_events_config", "has one address, but there are several replicas. Remove it."
        )
    template = parse_chat_template(args.chat_template)
    options = server_options(args)
    server.check_options(options)
    if args.dry_run:
        return print_plan(args.model_path, config)
    replicas = Replicas(
        args.model_path,
        config,
        name=options.model_name or hub_address(args.model_path)[0],
        options=ReplicaOptions(**flag_values(ReplicaOptions, args)),
        log_level=options.log_level,
    )
    try:
        signal.signal(signal.SIGHUP, lambda *_: Thread(target=replicas.update, daemon=True).start())
        return server.run_server(
            args.model_path,
            config,
            chat_template_config=template,
            options=options,
            start_core=lambda: StartedCore(replicas.make_core()),
        )
    finally:
        replicas.stop()


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Return the options of the HTTP server from parsed flags."""
    values = flag_values(ServerOptions, args)
    values["api_keys"] = api_keys(args.api_keys)
    return ServerOptions(**values, log_level=args.log_level)


def api_keys(flag: list[str] | None) -> list[str]:
    """Return the keys of the flag --api-keys, or those of LMDEPLOY_API_KEYS without the flag.

    Raises ValueError if one of them is set but contains no key.
    """
    name, given = "--api-keys", flag
    if flag is None:
        name, variable = "LMDEPLOY_API_KEYS", os.environ.get("LMDEPLOY_API_KEYS")
        given = None if variable is None else variable.split()
    keys = [key for key in given or [] if key]
    if given is not None and not keys:
        raise ValueError(f"{name} needs at least one key.")
    return keys


def print_plan(model_path: str, config: TurbomindEngineConfig) -> int:
    """Print a model's memory plan. Return the exit status."""
    for line in dry_run_lines(model_path, config):
        print(line)
    return 0


def dry_run_lines(model_path: str, config: TurbomindEngineConfig) -> list[str]:
    """Return the lines of a model's memory plan without loading its weights."""
    from lmdeploy import _turbomind
    from lmdeploy.engine.devices import device_line, free_bytes, open_device
    from lmdeploy.engine.kv_quality import cache_line, state_line
    from lmdeploy.engine.plan import plan_engine, read_draft_texts

    device = open_device(config)
    files, engine_config, kv = plan_engine(model_path, config, device=device)
    info = files.info
    free = free_bytes(device)
    draft_weights = 0 if files.draft is None else files.draft.info.weight_bytes
    left = max(free - info.weight_bytes - draft_weights, 0)
    plan = _turbomind.plan_memory(info.config, engine_config, left, device.capability)
    draft_bytes = draft_weights + plan.draft_cache_bytes + plan.draft_scratch_bytes
    peak = info.weight_bytes + plan.reserved_bytes + plan.scratch_bytes + draft_bytes
    draft = (
        f"draft model: {config.speculative_draft_model}, weights {draft_weights:,} bytes, cache "
        f"{plan.draft_cache_bytes:,}, scratch {plan.draft_scratch_bytes:,}"
    )
    if files.draft is not None:
        read_draft_texts(files, files.read_texts())  # checks that the vocabularies agree
    mapped = ""
    if info.mapped_bytes:
        mapped = f" ({info.mapped_bytes:,} of them MXFP4, read from the mapped file)"
    touched = f"touched bytes: {plan.touched_bytes:,} (memory is taken as tokens arrive)"
    return [
        f"model: {model_path} ({info.model_type}), weights {info.weight_bytes:,} bytes{mapped}",
        f"weights by part: {_parts_text(info)}",
        device_line(device),
        f"free memory: {free:,} bytes",
        cache_line(kv, plan, session_len=engine_config.session_len),
        *filter(None, [state_line(plan)]),
        f"blocks: {plan.num_blocks:,} of {engine_config.cache_block_seq_len} tokens",
        f"reserved bytes: {plan.reserved_bytes:,}",
        *([touched] if device.capability.reserves_lazily else []),
        f"scratch bytes: {plan.scratch_bytes:,} (activations of a full step)",
        *([draft] if files.draft is not None else []),
        f"peak bytes: {peak:,} (weights, the full cache and scratch)",
    ]


def _parts_text(info: ModelInfo) -> str:
    """Return the bytes and the formats of each part of the weights."""
    return ", ".join(
        f"{name} {part.num_bytes:,} bytes ({', '.join(part.formats)})"
        for name, part in info.parts.items()
    )

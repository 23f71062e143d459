"""A KV policy: the flags of the server, and the cache that the engine makes of them."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmdeploy.cli.engine_flags import engine_config
from lmdeploy.cli.main import make_parser
from lmdeploy.cli.option_flags import add_flags, names_of
from lmdeploy.config.engine import KV_CACHE, KV_INGREDIENTS, TurbomindEngineConfig
from lmdeploy.config.kv_format_options import TABLE_SUFFIXES

Plan = dict[str, str | float]  # the format and the size of a cache

REFERENCE = "0"
REFERENCE_FORMAT = "none"
# Flags that this script sets, or whose defaults it needs.
RESERVED_FLAGS = (
    *("--api-keys", "--disable-metrics", "--dry-run", "--model-name", "--server-name"),
    *("--server-port", "--help", "-h"),
)


@dataclass(frozen=True)
class Policy:
    """`name` is that of the command line; `quality` None selects the default of the server."""

    name: str
    quality: str | None
    server_flags: tuple[str, ...]  # for every policy

    @property
    def label(self) -> str:
        """Return the name in the table."""
        return self.name if self.quality is None else f"{self.name}/{self.quality}"

    @property
    def flags(self) -> list[str]:
        """Return the flags of the server."""
        table = "=" in self.name or self.name.lower().endswith(TABLE_SUFFIXES)
        flag = "--kv-cache-format" if table else "--quant-policy"
        quality = [] if self.quality is None else ["--kv-quality", self.quality]
        return [*self.server_flags, flag, self.name, *quality]

    def facts(self) -> dict[str, str | list[str]]:
        """Return what identifies the policy: flags, and digests of the files that they name."""
        paths = [Path(flag.rpartition("=")[2]) for flag in self.flags]
        files = [hashlib.sha256(p.read_bytes()).hexdigest() for p in paths if p.is_file()]
        return {"policy": self.label, "flags": self.flags, "files": files}

    def config(self) -> TurbomindEngineConfig:
        """Return the engine options of the flags. Raise ValueError for wrong flags."""
        wrong = [flag for flag in self.server_flags if flag.partition("=")[0] in RESERVED_FLAGS]
        if wrong:
            raise ValueError(f"{wrong[0]} is set by this script; remove it from the server flags.")
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                command = ["serve", "api_server", "MODEL", *self.flags]
                return engine_config(make_parser().parse_args(command))
        except SystemExit:
            raise ValueError(f"wrong server flags: {errors.getvalue().strip()}") from None


def _without_kv_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Remove the flags of the cache's accuracy, which a server refuses with the format none."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    names = names_of(TurbomindEngineConfig, KV_CACHE, KV_INGREDIENTS)
    add_flags(parser, TurbomindEngineConfig, title=KV_CACHE, names=names)
    try:
        return tuple(parser.parse_known_args(flags)[1])
    except argparse.ArgumentError as error:
        raise ValueError(f"flags of the server: {error}") from None


def make_policies(
    names: Sequence[str], qualities: Sequence[str | None], *, server_flags: Sequence[str]
) -> list[Policy]:
    """Return names × qualities in order. The 16-bit policy occurs once, without a quality."""
    found: dict[str, Policy] = {}
    for name in names:
        for quality in qualities:
            policy = Policy(name, quality, tuple(server_flags))
            if Policy(name, None, ()).config().kv_format == REFERENCE_FORMAT:
                policy = Policy(REFERENCE, None, _without_kv_flags(server_flags))
            policy.config()
            found.setdefault(policy.label, policy)
    return list(found.values())


def make_plan(model_path: str, policy: Policy) -> Plan:
    """Return the engine's own plan. This reads the config of the model but not its weights."""
    from lmdeploy import _turbomind
    from lmdeploy.base.resources import free_memory_bytes
    from lmdeploy.engine.model_files import open_files
    from lmdeploy.engine.plan import engine_config_of

    config = policy.config()
    info = open_files(model_path, dtype=config.dtype, exact=config.exact).info
    engine_config, options = engine_config_of(config, info.config, model_path=str(info.path))
    plan = _turbomind.plan_memory(info.config, engine_config, free_memory_bytes())
    quality = "" if options.format == REFERENCE_FORMAT else f" {options.quality}"
    return {
        "stored": options.format + quality,
        "kv_bytes_per_token": plan.bytes_per_token,
        "kv_window16_bytes_per_sequence": plan.window16_bytes_per_sequence,
    }

"""A KV policy: what the server is told, and what the engine makes of it."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmdeploy.cli.engine_flags import engine_config
from lmdeploy.cli.main import make_parser
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.kv_formats import TABLE_SUFFIXES

REFERENCE = "0"
REFERENCE_FORMAT = "none"
# What this script sets itself, or needs as it is.
RESERVED_FLAGS = frozenset(
    {
        "--api-keys",
        "--disable-metrics",
        "--dry-run",
        "--model-name",
        "--server-name",
        "--server-port",
        "--help",
        "-h",
    }
)


@dataclass(frozen=True)
class Policy:
    """`name` as given on the command line; quality None: the server's default."""

    name: str
    quality: str | None
    server_flags: tuple[str, ...]  # for every policy

    @property
    def label(self) -> str:
        """As it stands in the table."""
        return self.name if self.quality is None else f"{self.name}/{self.quality}"

    @property
    def flags(self) -> list[str]:
        """The server's flags."""
        table = "=" in self.name or self.name.lower().endswith(TABLE_SUFFIXES)
        flag = "--kv-cache-format" if table else "--quant-policy"
        quality = [] if self.quality is None else ["--kv-quality", self.quality]
        return [*self.server_flags, flag, self.name, *quality]

    def facts(self) -> dict[str, str | list[str]]:
        """What tells this policy from others: flags, and the content of files among them."""
        config = self.config()
        files = [config.kv_cache_format, config.kv_calibration, *self.server_flags]
        paths = [Path(str(file).partition("=")[2] or str(file)) for file in files if file]
        digests = [
            hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()
        ]
        return {"policy": self.label, "flags": self.flags, "files": digests}

    def config(self) -> TurbomindEngineConfig:
        """The engine options that the server will make of its flags.

        Raises ValueError for an unknown name and for flags that contradict each other.
        """
        wrong = [flag for flag in self.server_flags if flag.partition("=")[0] in RESERVED_FLAGS]
        if wrong:
            raise ValueError(f"flags of the server: {wrong[0]} is not for this script to pass on")
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told):
                command = ["serve", "api_server", "MODEL", *self.flags]
                return engine_config(make_parser().parse_args(command))
        except SystemExit:
            raise ValueError(f"flags of the server: {told.getvalue().strip()}") from None


def make_policies(
    names: Sequence[str], qualities: Sequence[str | None], *, server_flags: Sequence[str]
) -> list[Policy]:
    """Names × qualities in the order given; 16 bit once, since it has no qualities.

    Raises ValueError for what no server would accept.
    """
    found: dict[str, Policy] = {}
    for name in names:
        for quality in qualities:
            policy = Policy(name, quality, tuple(server_flags))
            if policy.config().kv_format == REFERENCE_FORMAT:
                policy = Policy(REFERENCE, None, tuple(server_flags))
            found.setdefault(policy.label, policy)
    return list(found.values())


@dataclass(frozen=True)
class Plan:
    """What a cache holds, from the engine's own plan.

    `hot_bytes` of the 16-bit blocks come on top, per sequence.
    """

    stored: str
    bytes_per_token: float
    hot_bytes: int


def make_plan(model_path: str, policy: Policy) -> Plan:
    """Reads the model's config but not its weights. ValueError for options that do not fit it."""
    from lmdeploy import _turbomind
    from lmdeploy.base.resources import free_memory_bytes
    from lmdeploy.engine.model_files import open_files
    from lmdeploy.engine.plan import engine_config_of

    config = policy.config()
    info = open_files(model_path, dtype=config.dtype, exact=config.exact).info
    native, options = engine_config_of(config, info.config, model_path=str(info.path))
    plan = _turbomind.plan_memory(info.config, native, free_memory_bytes())
    stored = (
        f"{options.mode} {options.quality}" if options.mode != REFERENCE_FORMAT else options.mode
    )
    return Plan(stored, plan.bytes_per_token, plan.hot_bytes_per_sequence)

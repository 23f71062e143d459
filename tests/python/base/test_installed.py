"""Test the commands that errors about missing packages name."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmdeploy.base import installed
from lmdeploy.config.kv_events import KvEventsConfig
from lmdeploy.kv_store.events import KvEventPublisher
from lmdeploy.kv_store.redis_store import RedisStore
from lmdeploy.replicas.deploy import _connect
from lmdeploy.serve.http.tracing import check_endpoint

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


@pytest.mark.parametrize(
    ("extra", "missing", "use"),
    [
        ("ray", "ray", lambda: _connect("auto")),
        ("redis", "redis", lambda: RedisStore("redis://localhost")),
        ("events", "zmq", lambda: KvEventPublisher(KvEventsConfig(), block_tokens=64)),
        ("otlp", "opentelemetry.sdk.trace", lambda: check_endpoint("http://localhost:4318")),
    ],
)
def test_error_about_a_missing_package_names_the_command(
    monkeypatch: pytest.MonkeyPatch, extra: str, missing: str, use: Callable[[], object]
) -> None:
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    packages = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"needs .* Run: pip install ") as info:
        use()
    command = str(info.value).partition("Run: ")[2]
    assert sorted(shlex.split(command)) == sorted(["pip", "install", *packages[extra]])


def test_install_command_without_metadata_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "OURS", "no-such-distribution")
    assert installed.install_command("ray") == "pip install 'no-such-distribution[ray]'"

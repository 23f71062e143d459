"""Tests of log levels: where messages go."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lmdeploy.base.logs import set_log_level

SCRIPT = """
import logging
from lmdeploy.base.logs import set_log_level
{before}
set_log_level({level!r})
set_log_level({level!r})
for name in ("debug", "info", "warning"):
    getattr(logging.getLogger("lmdeploy"), name)("a %s", name)
"""


def shown(level: str, *, before: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(level=level, before=before)],
        capture_output=True,
        timeout=60,
        text=True,
    )
    return done.stderr.splitlines()


def test_set_log_level_shows_messages_of_that_level() -> None:
    lines = ["DEBUG lmdeploy: a debug", "INFO lmdeploy: a info", "WARNING lmdeploy: a warning"]
    assert shown("DEBUG") == lines
    assert shown("INFO") == lines[1:]
    assert shown("WARNING") == ["a warning"]  # Python's default format


def test_set_log_level_adds_no_handler_to_a_configured_program() -> None:
    root = "logging.basicConfig(format='mine %(message)s')"
    assert shown("DEBUG", before=root) == ["mine a debug", "mine a info", "mine a warning"]


def test_set_log_level_rejects_unknown_level() -> None:
    with pytest.raises(ValueError, match=r"log_level is 'LOUD'. It must be one of DEBUG"):
        set_log_level("LOUD")

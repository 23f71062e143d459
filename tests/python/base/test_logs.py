"""Where messages below WARNING go."""

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


def test_messages_below_warning_are_shown() -> None:
    lines = ["DEBUG lmdeploy: a debug", "INFO lmdeploy: a info", "WARNING lmdeploy: a warning"]
    assert shown("DEBUG") == lines
    assert shown("INFO") == lines[1:]
    assert shown("WARNING") == ["a warning"]  # as Python does it


def test_handlers_of_the_program_are_the_only_ones() -> None:
    root = "logging.basicConfig(format='mine %(message)s')"
    assert shown("DEBUG", before=root) == ["mine a debug", "mine a info", "mine a warning"]


def test_a_level_that_is_none() -> None:
    with pytest.raises(ValueError, match="log_level: got 'LOUD', wanted one of DEBUG"):
        set_log_level("LOUD")

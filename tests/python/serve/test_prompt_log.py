"""Tests of the log of prompts (--max-log-len)."""

from __future__ import annotations

import logging

import pytest
from fake_engine import make_engine
from serving import CHAT, post, serving

PATH = "/v1/completions"


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "lmdeploy"]


def test_prompts_are_not_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="lmdeploy")
    with serving(make_engine()) as url:
        assert post(url, "/v1/chat/completions", CHAT).status_code == 200
    assert "hello" not in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_max_log_len_limits_the_logged_characters(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lmdeploy")
    body = {"model": "m", "prompt": ["a\nb" + "c" * 100, [100] * 3], "stream": stream}
    with serving(make_engine(), max_log_len=5) as url:
        assert post(url, PATH, body).status_code == 200
        unknown = {"model": "m", "prompt": [257, 97], "max_tokens": 1}
        assert post(url, PATH, unknown).status_code == 200
        assert post(url, "/v1/chat/completions", CHAT).status_code == 200
    assert logged(caplog) == [
        f"POST {PATH}: a prompt of 103 tokens: 'a\\nbcc'",
        f"POST {PATH}: a prompt of 3 tokens: 'ddd'",
        f"POST {PATH}: a prompt of 2 tokens: 'a'",
        "POST /v1/chat/completions: a prompt of 23 tokens: '<user'",
    ]


def test_prompts_are_not_logged_above_the_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="lmdeploy")
    with serving(make_engine(), max_log_len=5) as url:
        assert post(url, PATH, {"model": "m", "prompt": "abc"}).status_code == 200
    assert logged(caplog) == []

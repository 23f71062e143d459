"""Chat templates for tests, which share the process that renders."""

from __future__ import annotations

from functools import cache

from lmdeploy.chat.bounded.process import BoundedPool
from lmdeploy.chat.templates.jinja_template import ChatTemplate, start_renderer


@cache
def _renderer() -> BoundedPool:
    return start_renderer()


def chat_template(
    source: str, *, origin: str = "test", bos_token: str = "", eos_token: str = ""
) -> ChatTemplate:
    """Return a template."""
    return ChatTemplate(
        source, origin=origin, bos_token=bos_token, eos_token=eos_token, renderer=_renderer()
    )

"""Tests of the recipe for an HTTP endpoint in docs/extending.md: its code runs as it is printed."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import httpx
import pytest
from fake_engine import make_engine
from serving import post, serving

from lmdeploy.serve import app
from lmdeploy.serve.routes import ROUTERS

RECIPES = Path(__file__).parents[3] / "docs" / "extending.md"


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    """Add the endpoint of the recipe to the server."""
    (code,) = re.findall(r'```python\n( *"""POST /v1/count.*?)```', RECIPES.read_text(), re.DOTALL)
    path = tmp_path / "count.py"
    path.write_text(textwrap.dedent(code))
    spec = importlib.util.spec_from_file_location("recipe_count", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "recipe_count", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(app, "ROUTERS", (*ROUTERS, module.router))
    return module


def test_endpoint_of_the_recipe_counts_tokens_and_rejects_long_texts(endpoint):
    with serving(make_engine()) as url:
        reply = post(url, "/v1/count", {"text": "abc"})
        ids = post(url, "/v1/encode", {"input": "abc"}).json()["input_ids"]
        assert (reply.status_code, reply.json()) == (200, {"length": len(ids)})
        too_long = post(url, "/v1/count", {"text": "a" * 10**6})
        assert too_long.status_code == 400
        assert ". However, text has 1000000 characters" in too_long.json()["error"]["message"]
        assert post(url, "/v1/count", {"text": 1}).status_code == 400
        schema = httpx.get(f"{url}/openapi.json").json()
        assert "CountRequest" in schema["components"]["schemas"]

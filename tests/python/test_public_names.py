"""Tests of the import paths that users type."""

import importlib

import pytest

NAMES = {
    "lmdeploy": (
        "pipeline serve Pipeline TurbomindEngineConfig GenerationConfig ChatTemplateConfig "
        "Response Tokenizer APIClient client __version__"
    ),
    "lmdeploy.api": "client pipeline serve",
    "lmdeploy.kv_cache": "CacheConfig KVCache memory_table",
    "lmdeploy.kv_rows": "pack_rows unpack_rows",
    "lmdeploy.messages": "GenerationConfig Response ResponseType TurbomindEngineConfig",
    "lmdeploy.model": "ChatTemplateConfig",
    "lmdeploy.pipeline": "Pipeline",
    "lmdeploy.tokenizer": "Tokenizer",
    "lmdeploy.version": "__version__ version_info",
    "lmdeploy.serve.openai.api_client": "APIClient",
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_are_importable(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []

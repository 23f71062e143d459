"""Tests of the import paths that users type."""

import importlib

import pytest

NAMES = {
    "lmdeploy": (
        "pipeline serve Pipeline TurbomindEngineConfig GenerationConfig ChatTemplateConfig "
        "Response Tokenizer APIClient client __version__ PytorchEngineConfig VisionConfig "
        "SpeculativeConfig"
    ),
    "lmdeploy.api": "client pipeline serve",
    "lmdeploy.kv_cache": "CacheConfig KVCache StoredRows memory_table",
    "lmdeploy.kv_rows": "pack_rows unpack_rows",
    "lmdeploy.kv_store.blocks": "KvBlocks",
    "lmdeploy.kvx": "KvxError check include_folder library library_path",
    "lmdeploy.kvx.abi": "CacheDesc GatherDesc Status TmFlag TmLayer TmMode WriteDesc",
    "lmdeploy.kvx.adapters": (
        "gather rows tensor tgi_tables trtllm_cache trtllm_tables vllm_cache vllm_slots write"
    ),
    "lmdeploy.kvx.layers": "KvLayer layer_of",
    "lmdeploy.messages": (
        "GenerationConfig Response ResponseType TurbomindEngineConfig PytorchEngineConfig "
        "VisionConfig SpeculativeConfig"
    ),
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


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("PytorchEngineConfig", "Use TurbomindEngineConfig, which has the same names"),
        ("VisionConfig", "Remove it"),
        ("SpeculativeConfig", "Use speculative_algorithm"),
    ],
)
def test_absent_option_class_names_its_replacement(name: str, advice: str) -> None:
    for module in ("lmdeploy", "lmdeploy.messages"):
        absent = getattr(importlib.import_module(module), name)
        for options in ({}, {"tp": 2, "session_len": 4096}):
            with pytest.raises(ValueError, match=f"^{name} is not supported. {advice}"):
                absent(**options)

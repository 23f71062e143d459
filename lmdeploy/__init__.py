"""LLM inference with a quantized, paged KV cache. The public names are those of LMDeploy."""

from __future__ import annotations

from lmdeploy.api import client, pipeline, serve
from lmdeploy.base.installed import warn_of_namesake
from lmdeploy.config.absent import PytorchEngineConfig, SpeculativeConfig, VisionConfig
from lmdeploy.config.chat_template import ChatTemplateConfig
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.pipeline import Pipeline
from lmdeploy.response import Response, ResponseType
from lmdeploy.serve.openai.api_client import APIClient
from lmdeploy.tokenizer import Tokenizer
from lmdeploy.version import __version__, version_info

__all__ = [
    "APIClient",
    "ChatTemplateConfig",
    "GenerationConfig",
    "Pipeline",
    "PytorchEngineConfig",
    "Response",
    "ResponseType",
    "SpeculativeConfig",
    "Tokenizer",
    "TurbomindEngineConfig",
    "VisionConfig",
    "__version__",
    "client",
    "pipeline",
    "serve",
    "version_info",
]

warn_of_namesake()

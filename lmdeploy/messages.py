"""Public names that LMDeploy 0.18 keeps in this module. Other modules define them."""

from lmdeploy.config.absent import PytorchEngineConfig, SpeculativeConfig, VisionConfig
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.response import Response, ResponseType

__all__ = [
    "GenerationConfig",
    "PytorchEngineConfig",
    "Response",
    "ResponseType",
    "SpeculativeConfig",
    "TurbomindEngineConfig",
    "VisionConfig",
]

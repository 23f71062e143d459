"""Public names that LMDeploy 0.18 keeps in this module. They are defined elsewhere."""

from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.response import Response, ResponseType

__all__ = ["GenerationConfig", "Response", "ResponseType", "TurbomindEngineConfig"]

"""Public names that LMDeploy 0.18 keeps in this module. They are defined elsewhere."""

from lmdeploy.config.chat_template import ChatTemplateConfig

__all__ = ["ChatTemplateConfig"]

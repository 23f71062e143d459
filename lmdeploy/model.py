"""A public name that LMDeploy 0.18 keeps in this module. Another module defines it."""

from lmdeploy.config.chat_template import ChatTemplateConfig

__all__ = ["ChatTemplateConfig"]

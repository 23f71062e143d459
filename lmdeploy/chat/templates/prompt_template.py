"""② Choose the template of a conversation and render prompts with it."""

from __future__ import annotations

import copy
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.messages import is_continued

if TYPE_CHECKING:
    from lmdeploy.chat.templates.jinja_template import ChatTemplate
    from lmdeploy.chat.tokenizer import Tokenizer
    from lmdeploy.config.chat_template import ChatTemplateConfig

logger = logging.getLogger("lmdeploy")

NO_TEMPLATE = (
    "cannot be rendered because the model has no chat template. Use /v1/completions "
    "(do_preprocess=False) or --chat-template."
)
_NO_NAMES = ("custom", "hf")  # names without meaning, because model_name is required
_PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
_FROM_TEXTS = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ texts.system }}{{ m.content }}{{ texts.eosys }}
{%- elif m.role == 'user' %}{{ texts.user }}{{ m.content }}{{ texts.eoh }}
{%- else %}{{ texts.assistant }}{{ m.content }}{{ texts.eoa }}{{ texts.separator }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ texts.assistant }}{% endif -%}
"""
_TEXTS = ("system", "eosys", "user", "eoh", "assistant", "eoa", "separator")


class PromptTemplate:
    """The model's template, or the one that a ChatTemplateConfig selects. Immutable.

    `add_special`: the tokenizer adds BOS before the prompt. Jinja templates write it themselves.
    `continue_final_message`: the answer continues the text of the prompt instead of beginning a new
    text.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        meta_instruction: str | None = None,
        texts: dict[str, str] | None = None,
        stop_words: list[str] | None = None,
        add_special: bool = False,
        continue_final_message: bool = False,
    ) -> None:
        self.add_special = add_special
        self.continue_final_message = continue_final_message
        self._template = template
        self._meta_instruction = meta_instruction
        self._texts = texts or {}
        self.stop_words = list(stop_words or [])
        self.source = template.source  # with that of the template for tools
        if template.with_tools is not None:
            self.source += template.with_tools.source
        self._begins_answer: bool | None = None

    def ending(self, *, begins_answer: bool) -> PromptTemplate:
        """Return a template that never continues an answer at the end.

        `begins_answer` begins another answer after the messages. Otherwise the prompt ends with
        the last message.
        """
        template = copy.copy(self)
        template._begins_answer = begins_answer
        return template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: dict[str, Any],
        *,
        continues: bool = True,
    ) -> str:
        """Return the prompt. `options` are further variables of the template.

        `continues` continues an answer at the end. Otherwise another answer begins.
        """
        if self._meta_instruction and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": self._meta_instruction}, *messages]
        variables = {**options, "texts": self._texts}
        begins_answer = self._begins_answer
        if begins_answer is not None or not (continues and is_continued(messages)):
            return self._template.render(
                messages, add_generation_prompt=begins_answer is not False, variables=variables
            )
        content = messages[-1]["content"]
        # Random, so that no message contains it, and without letters, whose case may change.
        mark = str(secrets.randbits(128))
        last = {**messages[-1], "content": content + mark}
        text = self._template.render(
            [*messages[:-1], last], add_generation_prompt=False, variables=variables
        )
        end = text.rfind(mark)
        if end < 0:
            raise OptionError(
                "messages",
                "ends with an assistant message, which the chat template leaves out of the prompt. "
                "Send a user message last or change --chat-template.",
            )
        return _with_spaces(text[:end], content)


def _with_spaces(prompt: str, content: str) -> str:
    """Return a prompt that ends with `content`, whose first spaces the template may trim."""
    trimmed = content.lstrip()
    if prompt.endswith(content) or not prompt.endswith(trimmed):
        return prompt
    return prompt[: len(prompt) - len(trimmed)] + content


def choose_template(
    own: ChatTemplate | None, config: ChatTemplateConfig | None, *, tokenizer: Tokenizer
) -> PromptTemplate | None:
    """Return the template to use, or None if neither the model nor `config` has one."""
    from lmdeploy.chat.templates.jinja_template import ChatTemplate, template_from_file

    if config is None:
        return None if own is None else PromptTemplate(own)
    texts = {name: getattr(config, name) or "" for name in _TEXTS}

    def made(source: str, origin: str) -> ChatTemplate:
        bos, eos = tokenizer.bos_token, tokenizer.eos_token
        return ChatTemplate(source, origin=origin, bos_token=bos, eos_token=eos)

    template, add_special = own, False
    if config.model_path is not None:
        template = template_from_file(config.model_path, tokenizer)
    elif config.capability == "completion":
        template, add_special = made(_PLAIN, "capability"), True
    elif any(texts.values()):
        template = made(_FROM_TEXTS, "ChatTemplateConfig")
        add_special = True
    elif config.model_name not in _NO_NAMES:
        logger.warning(
            "The model_name %r of ChatTemplateConfig has no effect, and the model's template is "
            "used. To replace it, set model_path or the texts.",
            config.model_name[:80],
        )
    if template is None:
        return None
    return PromptTemplate(
        template,
        meta_instruction=config.meta_instruction,
        texts=texts,
        stop_words=config.stop_words,
        add_special=add_special,
        continue_final_message=config.model_path is None and config.capability == "completion",
    )

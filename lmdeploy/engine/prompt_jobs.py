"""② Turn the prompts of a pipeline call into jobs for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from lmdeploy.base.checks import ContextLengthError, OptionError, refuse
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.response import Response

if TYPE_CHECKING:
    from lmdeploy.chat.formats.base import AnswerStart
    from lmdeploy.chat.grammar import Grammars
    from lmdeploy.engine.async_engine import AsyncEngine
    from lmdeploy.engine.load import TextModel

Message: TypeAlias = dict[str, Any]
Prompt: TypeAlias = "str | list[Message]"


@dataclass
class PromptJob:
    """One response to one prompt. `index` is the number of the prompt, `choice` of the response."""

    ids: list[int]
    config: GenerationConfig
    index: int = 0
    choice: int = 0
    start: AnswerStart | None = None
    grammars: Grammars | None = None  # shared by all jobs of the call
    error: ContextLengthError | None = None  # why the prompt cannot run

    def refused(self, error: ContextLengthError) -> Response:
        """Return the response to a prompt that is longer than the context."""
        return Response(
            "",
            0,
            len(self.ids),
            "error",
            index=self.index,
            error_code="context_length_exceeded",
            error_message=str(error),
            choice=self.choice,
        )


def prompt_jobs(
    engine: AsyncEngine,
    prompts: Prompt | Sequence[Prompt],
    *,
    gen_config: GenerationConfig | list[GenerationConfig] | None,
    template_options: dict[str, Any] | None,
) -> tuple[list[PromptJob], bool]:
    """Return the jobs of a call, and whether `prompts` is a single prompt.

    Args:
        template_options: variables of the chat template. None applies no template.

    Raise ValueError for a wrong prompt or config.
    """
    single = isinstance(prompts, str) or _is_conversation(prompts)
    if isinstance(prompts, tuple):
        raise OptionError("prompts", _PICTURES)
    if not single and not isinstance(prompts, list):
        raise refuse("prompts", prompts, wanted="a string, a conversation, or a list of either")
    batch: list[Any] = [prompts] if single else list(prompts)
    configs: list[Any] = (
        list(gen_config) if isinstance(gen_config, list) else [gen_config] * len(batch)
    )
    if len(configs) != len(batch):
        raise ValueError(
            f"gen_config has {len(configs)} items for {len(batch)} prompts. "
            "Pass one config, or one per prompt."
        )
    jobs = []
    grammars = engine.new_grammars()
    for i, (prompt, config) in enumerate(zip(batch, configs, strict=True)):
        config = GenerationConfig() if config is None else config
        if not isinstance(config, GenerationConfig):
            raise refuse("gen_config", config, wanted="a GenerationConfig")
        ids: list[int] = []
        start: AnswerStart | None = None
        overflow: ContextLengthError | None = None
        try:
            ids, start = _encode(engine.text, prompt, template_options=template_options)
            engine.check_prompt(ids, num_new=min(config.max_new_tokens, 1))
        except ContextLengthError as error:
            if single:
                raise
            overflow = error
        except OptionError as error:
            if single:
                raise
            reason = error.reason if error.field == "prompt" else f"is invalid: {error}"
            raise OptionError(f"prompts[{i}]", reason) from error
        jobs += [
            PromptJob(ids, config, i, choice, start, grammars, overflow)
            for choice in range(config.n)
        ]
    return jobs, single


_PICTURES = (
    "is a tuple, which in LMDeploy is a text with pictures. This engine reads text alone. Send a "
    "string, or a list of prompts."
)


def _encode(
    model: TextModel, prompt: Any, *, template_options: dict[str, Any] | None
) -> tuple[list[int], AnswerStart | None]:
    """Return the token ids and, for a conversation, the state in which its response starts."""
    from lmdeploy.chat.prompts import encode_chat, encode_text

    if isinstance(prompt, str) and template_options is None:
        return encode_text(model, prompt, add_special=True), None
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, tuple):
        raise OptionError("prompt", _PICTURES)
    if not _is_conversation(prompt):
        raise refuse("prompt", prompt, wanted="a string or a list of messages")
    if template_options is None:
        wanted = "a string because do_preprocess=False skips the chat template"
        raise refuse("prompt", prompt, wanted=wanted)
    return encode_chat(model, prompt, template_options=template_options)


def _is_conversation(prompts: Any) -> bool:
    return (
        isinstance(prompts, list)
        and len(prompts) > 0
        and all(isinstance(item, dict) for item in prompts)
    )

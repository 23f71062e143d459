"""The registry of reasoning and tool-call parsers. A new parser needs a file and a line here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lmdeploy.chat.formats.base import NO_PARSER, ChatFormat, ModelInfo, Parser
from lmdeploy.chat.formats.gemma import GemmaCalls
from lmdeploy.chat.formats.harmony.format import Harmony
from lmdeploy.chat.formats.json_calls import JsonCalls
from lmdeploy.chat.formats.llama3 import Llama3Calls
from lmdeploy.chat.formats.mistral import MistralCalls
from lmdeploy.chat.formats.prompted_calls import PromptedCalls
from lmdeploy.chat.formats.tagged_calls import TaggedCalls
from lmdeploy.chat.formats.text import TextFormat
from lmdeploy.chat.formats.think import Think

logger = logging.getLogger("lmdeploy")

# Without a flag, the first parser that matches the model is used.
_HARMONY = Harmony()
REASONING_PARSERS: tuple[Parser, ...] = (
    _HARMONY,
    Think(("deepseek-r1",), model_types=("deepseek_v3",), begins_open=True),
    Think(("gemma", "gemma4"), begin="<|channel>thought", end="<channel|>", is_fallback=True),
    Think(("seed_oss",), begin="<seed:think>", end="</seed:think>", is_fallback=True),
    Think(
        ("qwen3", "default", "deepseek-v3", "deepseek-v32", "deepseek-v4", "intern-s1"),
        is_fallback=True,
    ),
)
TOOL_CALL_PARSERS: tuple[Parser, ...] = (
    _HARMONY,
    JsonCalls(
        ("qwen3", "qwen", "qwen2d5", "hermes"),
        begin="<tool_call>",
        end="</tool_call>",
        space="\n",
        separator="\n",
        template_marks=("<tool_call>",),
        foreign_marks=("<function=", "<arg_key>", "<tool_calls>", "minimax"),
    ),
    JsonCalls(
        ("internlm2",),
        begin="<|action_start|><|plugin|>",
        end="<|action_end|>",
        space="\n",
        arguments_key="parameters",
        template_marks=("<|action_start|>",),
    ),
    TaggedCalls.from_example(
        ("qwen3coder", "qwen3_coder", "interns2-preview"),
        "<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>",
        template_marks=("<tool_call>", "<function="),
    ),
    TaggedCalls.from_example(
        ("seed_oss",),
        "<seed:tool_call>\n<function={name}>\n<parameter={key}>{value}</parameter>\n</function>\n"
        "</seed:tool_call>",
        template_marks=("<seed:tool_call>", "<function="),
    ),
    TaggedCalls.from_example(
        ("glm45",),
        "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        template_marks=("<tool_call>", "</arg_key>\n<arg_value>"),
    ),
    TaggedCalls.from_example(
        ("glm47",),
        "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>",
        template_marks=("<tool_call>", "</arg_key><arg_value>"),
    ),
    *(
        TaggedCalls.from_example(
            (name,),
            f'<｜DSML｜{block}>\n<｜DSML｜invoke name="{{name}}">\n'
            '<｜DSML｜parameter name="{key}" string="{is_string}">{value}</｜DSML｜parameter>\n'
            f"</｜DSML｜invoke>\n</｜DSML｜{block}>",
            is_block=True,
            template_marks=("｜DSML｜", block),
        )
        for name, block in (("deepseek-v32", "function_calls"), ("deepseek-v4", "tool_calls"))
    ),
    TaggedCalls.from_example(
        ("minimax_m2",),
        '<minimax:tool_call>\n<invoke name="{name}">\n<parameter name="{key}">{value}</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        is_block=True,
        template_marks=("<minimax:tool_call>", '<invoke name="'),
    ),
    MistralCalls(),
    Llama3Calls(),
    GemmaCalls(("gemma", "gemma4"), begin="<|tool_call>", end="<tool_call|>", quote='<|"|>'),
    GemmaCalls(
        ("functiongemma",),
        begin="<start_function_call>",
        end="<end_function_call>",
        quote="<escape>",
    ),
    PromptedCalls(("prompted",), begin="<tool_call>", end="</tool_call>", space="\n"),
)


def parser_names(parsers: Sequence[Parser]) -> tuple[str, ...]:
    """Return the names that a flag accepts."""
    return (*(name for parser in parsers for name in parser.names), NO_PARSER)


def choose_format(
    model: ModelInfo,
    *,
    reasoning_parser: str | None = None,
    tool_call_parser: str | None = None,
) -> ChatFormat:
    """Return the chat format of a model.

    Args:
        reasoning_parser: name of the reasoning part. "none" uses no parser. None uses the default
            for the model.
        tool_call_parser: name of the tool-call part, in the same way.

    Raise ValueError for an unknown name, and if a named part does not support the model or the
    other part. A default part that is not supported is skipped with a warning.
    """
    chat_format: ChatFormat = TextFormat(model.tokenizer)
    found: list[Parser] = []
    for flag, name, parsers in (
        ("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
        ("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS),
    ):
        if name is None:
            found += [parser for parser in parsers if parser.matches(model)][:1]
            continue
        if name == NO_PARSER:
            continue
        try:
            chat_format = _find(parsers, name).extend(chat_format, model)
        except ValueError as error:
            raise ValueError(f"{error} Change or remove {flag}.") from None
    for parser in dict.fromkeys(found):
        try:
            chat_format = parser.extend(chat_format, model)
        except ValueError as error:
            logger.warning("%s The parser %s is not used.", error, parser.names[0])
    return chat_format


def _find(parsers: Sequence[Parser], name: str) -> Parser:
    for parser in parsers:
        if name in parser.names:
            return parser
    raise ValueError(f"There is no parser {name!r}, only {', '.join(parser_names(parsers))}.")

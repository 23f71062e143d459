"""Write docs/reference/{flags,fields,limits}.md and docs/models.md from the code.

Run it after a change to a flag, a field, a limit or a model: python scripts/dev/make_reference.py
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmdeploy.checkpoint.files.text_part import TEXT_ARCHITECTURES
from lmdeploy.cli.main import make_parser
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.config.option import MAX_INT, DeclaredOption, options_of
from lmdeploy.models import FAMILIES
from lmdeploy.models.rope import ROPE_KINDS
from lmdeploy.serve.routes import ROUTERS
from lmdeploy.serve.schema import ApiRequest

DOCS = Path(__file__).resolve().parents[2] / "docs"
DIVERGENCES = DOCS.parent / "benchmarks" / "results" / "families_kl.jsonl"
NOTE = "<!-- Written by scripts/dev/make_reference.py. Do not edit by hand. -->"
# Module, constant, what it limits. {} is the place of the number.
LIMITS = (
    ("serve.http.bodies", "MAX_BODY_BYTES", "{} bytes in a request's body"),
    ("serve.http.bodies", "MAX_OPEN_BODIES", "{} incomplete bodies at the same time"),
    ("serve.http.bodies", "MAX_OPEN_BYTES", "{} bytes in incomplete bodies at the same time"),
    ("serve.http.bodies", "BODY_SECONDS", "{} seconds until a body is complete"),
    ("serve.http.connections", "HEAD_SECONDS", "{} seconds until a head is complete"),
    (
        "serve.http.connections",
        "UNREAD_SECONDS",
        "{} seconds in which a client reads nothing although a response waits",
    ),
    ("serve.http.connections", "MAX_WAITING", "{} connections with an incomplete head after 1 s"),
    ("serve.http.accepting", "MAX_DESCRIPTORS", "{} open files, or the system's limit if lower"),
    ("serve.http.accepting", "RESERVED_DESCRIPTORS", "{} of them are not used for connections"),
    ("serve.http.response_store", "MAX_ENTRIES", "{} stored responses"),
    (
        "serve.http.response_store",
        "MAX_BYTES",
        "{} bytes of stored responses; the key that holds most loses its oldest",
    ),
    ("serve.http.response_store", "MAX_AGE_SECONDS", "{} seconds for which a response is stored"),
    ("serve.schema", "MAX_BODY_VALUES", "{} JSON values in a body; a token id is one"),
    ("serve.schema", "MAX_PROMPTS", "{} prompts in a request"),
    ("serve.jobs", "MAX_ANSWERS", "{} choices in a request, over all prompts"),
    ("config.generation", "MAX_N", "`n` is at most {}"),
    ("serve.jobs", "MAX_GRAMMAR_ANSWERS", "{} choices in a request with `response_format`"),
    ("serve.jobs", "MAX_PROMPT_TOKENS", "{} prompt tokens in a request, once per choice"),
    ("serve.jobs", "MAX_LOGPROB_VALUES", "{} log probabilities in a response"),
    ("config.generation", "MAX_LOGPROBS", "{} log probabilities per token"),
    ("serve.routes.encode", "MAX_ENCODED_TOKENS", "{} tokens in a response of `/v1/encode`"),
    ("serve.routes.markdown", "MAX_MARKDOWN_CHARS", "{} characters in `/render_markdown`"),
    (
        "serve.rendering.tree",
        "MAX_MARKDOWN_NODES",
        "{} elements in a response of `/render_markdown`",
    ),
    ("serve.rendering.child", "MAX_SECONDS", "{} seconds until `/render_markdown` has a response"),
    ("serve.rendering.limits", "MAX_PART_SECONDS", "{} s of CPU time for a block of code"),
    ("serve.rendering.highlighting", "MAX_HIGHLIGHTED_CHARS", "{} characters of code with colors"),
    ("serve.rendering.formulas", "MAX_FORMULA_CHARS", "{} characters in a formula"),
    ("serve.admission", "MAX_HELD_TOKENS", "{} prompt tokens of all requests that a server holds"),
    ("chat.messages", "MAX_MESSAGES", "{} messages"),
    ("chat.prompts", "MAX_OPTIONS_SIZE", "{} characters in `chat_template_kwargs`"),
    ("chat.prompts", "MAX_OPTIONS_DEPTH", "{} nested levels in `chat_template_kwargs`"),
    ("chat.tool_calls", "MAX_TOOLS", "{} tools"),
    ("chat.messages", "MAX_TOOL_CALLS", "{} tool calls in a message"),
    ("config.generation", "MAX_STOP_WORDS", "{} stop words"),
    ("config.generation", "MAX_STOP_WORD_CHARS", "{} characters in a stop word"),
    ("config.generation", "MAX_ALL_STOP_CHARS", "{} characters in all stop words"),
    ("config.generation", "MAX_TOKEN_IDS", "{} `stop_token_ids` or `bad_token_ids`"),
    ("config.generation", "MAX_LOGIT_BIAS", "{} entries in `logit_bias`"),
    ("chat.grammar", "MAX_GRAMMAR_CHARS", "{} characters in a grammar (`response_format`)"),
)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([NOTE, f"# {title}", *parts]) + "\n"


def _commands(
    parser: argparse.ArgumentParser, name: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command that has no subcommands."""
    for action in parser._actions:  # argparse has no public way to a subcommand
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield from _commands(child, f"{name} {word}")
            return
    yield name, parser


def _flag_rows(parser: argparse.ArgumentParser) -> list[list[str]]:
    rows = []
    for action in parser._actions:
        # Flags of LMDeploy that are refused by name are hidden from the help text.
        if action.help in (None, argparse.SUPPRESS) or action.dest == "help":
            continue
        names = [flag for flag in action.option_strings if flag.startswith("--")]
        name = "<br>".join(f"`{flag}`" for flag in names) or f"`{action.dest.upper()}`"
        text = parser._get_formatter()._expand_help(action)
        choices = [str(choice) for choice in action.choices or ()]
        if not all(choice in text for choice in choices):
            listed = ", ".join(f"`{choice}`" for choice in choices)
            text += f" One of {listed}." if text.endswith(".") else f"; one of {listed}"
        rows.append([name, text])
    return rows


def make_flags() -> str:
    """Return the page of all flags; flags that two commands share are listed once."""
    commands = dict(_commands(make_parser(), "lmdeploy"))
    rows = {name: _flag_rows(parser) for name, parser in commands.items()}
    names = ("lmdeploy chat", "lmdeploy serve api_server")
    shared = [row for row in rows[names[0]] if row in rows[names[1]]]
    parts = [
        "Every other flag of LMDeploy 0.18 is refused by name, unless it has its default value.",
        f"## {' and '.join(names)}",
        _table(["flag", "meaning"], shared),
    ]
    for name in names:
        rows[name] = [row for row in rows[name] if row not in shared]
    # lmdeploy serve ray has the flags of the other server, too.
    of_server = [*shared, *rows[names[1]]]
    rows["lmdeploy serve ray"] = [r for r in rows["lmdeploy serve ray"] if r not in of_server]
    parts[0] += " `lmdeploy serve ray` has all flags of `lmdeploy serve api_server`."
    for name in sorted(rows, key=list(commands).index):
        parts += [f"## {name}", _table(["flag", "meaning"], rows[name])]
    return _page("Flags", *parts)


def _bodies() -> Iterator[tuple[str, type[ApiRequest]]]:
    """Yield the path of every POST endpoint with the schema of its body."""
    for route in (route for router in ROUTERS for route in router.routes):
        if route.about is not None and route.about.body is not None:
            yield route.path, route.about.body


def _allowed(field: dict[str, Any]) -> str:
    """Describe the values of a field of a JSON schema."""
    options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    texts = []
    for option in options:
        text = option.get("type", "object")
        if "const" in option:
            text = str(option["const"]).lower()
        if "enum" in option:
            text = " or ".join(f'"{value}"' for value in option["enum"])
        if text == "array":
            text = f"list of {option['items'].get('type', 'any value')}s"
        low = option.get("minimum", option.get("exclusiveMinimum"))
        high = option.get("maximum", option.get("exclusiveMaximum"))
        if low is not None:
            left = ">" if "exclusiveMinimum" in option else "≥"
            text += f" {left} {_number(low)}"
        if high is not None:
            right = "<" if "exclusiveMaximum" in option else "≤"
            text += f"{',' if low is not None else ''} {right} {_number(high)}"
        if "maxItems" in option:
            text += f", at most {option['maxItems']:,}"
        texts.append(text)
    return " or ".join(texts)


def _values(option: DeclaredOption) -> str:
    """Describe the values of an option in Python."""
    low, high, above = option.more.low, option.more.high, option.more.above
    if option.choices:
        texts = [f"`{choice!r}`" for choice in option.choices]
    else:
        kinds = [k.__name__ if isinstance(k, type) else str(k) for k in option.kinds]
        texts = [f"`{re.sub(r'(typing|os)[.]', '', kind)}`" for kind in kinds]
    if option.kind in (int, float) and not option.choices and option.more.check is None:
        texts[0] += f" ≥ {_number(low)}" if above is None else f" > {_number(above)}"
        texts[0] += f", ≤ {_number(high)}" if high != MAX_INT else ""
    elif option.kind in (list[int], list[str]) and option.more.check is None:
        texts[0] += f", at most {int(high):,}"
    return " or ".join([*texts, "`None`"] if option.is_optional else texts)


def _number(value: float) -> str:
    exponent = int(abs(value)).bit_length() - 1
    if exponent > 20 and abs(value) == 2**exponent:
        return ("-" if value < 0 else "") + f"2^{exponent}"
    if value == 2 ** (exponent + 1) - 1 and exponent > 20:
        return f"2^{exponent + 1} - 1"
    return f"{value:g}"


def _default(value: Any) -> str:
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def make_fields() -> str:
    """Return the page of request fields and of the options in Python."""
    parts = ["## Request bodies"]
    parts.append(
        "A field of OpenAI, LMDeploy, vLLM or SGLang that is not built and changes the answer is "
        'accepted only with the value that means "not used", and refused by name otherwise. '
        "`lmdeploy/config/unsupported.py` lists them. Any other field is ignored; the metric "
        "`lmdeploy:request_unknown_fields_total` counts the unknown ones."
    )
    for path, model in _bodies():
        described = model.model_json_schema()
        rows = []
        for name, field in sorted(described["properties"].items()):
            required = name in described.get("required", [])
            default = "required" if required else _default(field.get("default"))
            rows.append([f"`{name}`", _allowed(field), default])
        parts += [f"### `{path}`", _table(["field", "values", "default"], rows)]
    for cls in (TurbomindEngineConfig, GenerationConfig):
        options = options_of(cls).values()
        built = [option for option in options if option.more.unsupported is None]
        rows = [[f"`{o.name}`", _values(o), _default(o.default), o.meaning] for o in built]
        parts += [f"## {cls.__name__}", _table(["option", "values", "default", "meaning"], rows)]
        refused = [
            [f"`{option.name}`", f"`{option.default!r}`", option.more.unsupported]
            for option in options
            if option.more.unsupported is not None
        ]
        parts.append("Every other value of these options of LMDeploy is refused:")
        parts.append(_table(["option", "only value", "because"], refused))
    return _page("Fields", *parts)


def make_limits() -> str:
    """Return the page of the limits of one request."""
    rows = []
    for module, name, text in LIMITS:
        value = getattr(importlib.import_module(f"lmdeploy.{module}"), name)
        rows.append([text.format(f"{value:,}"), f"`{name}`"])
    return _page(
        "Limits",
        "A request beyond a limit is refused with HTTP 400, a body that is too large with 413, one "
        "that is too slow with 408, and one for which the server has no room with 503.",
        _table(["at most", "constant"], rows),
    )


def _table_of_divergences() -> str:
    """Return the KL divergence of each KV format by family, from scripts/eval_families.py."""
    rows = [json.loads(line) for line in DIVERGENCES.read_text(encoding="utf-8").splitlines()]
    formats = list(rows[0]["kl"])
    cells = [
        [f"`{row['family']}`", *(f"{row['kl'][kv_format]:.2g}" for kv_format in formats)]
        for row in rows
    ]
    return _table(["family", *formats], cells)


def make_models() -> str:
    """Return the page of the models."""
    rows = [
        [
            family.models,
            ", ".join(f"`{name}`" for name in family.hf_architectures),
            ", ".join(f"`{name}`" for name in family.gguf_architectures),
            family.differs,
        ]
        for family in FAMILIES
    ]
    vision = "\n".join(f"* `{name}`" for name in TEXT_ARCHITECTURES)
    return _page(
        "Models",
        "A folder from Hugging Face is recognized by the `architectures` of its config.json, and a "
        "GGUF file by its `general.architecture`. Others are refused with this list. Where the "
        "GGUF column is empty, GGUF calls the model `llama`, or its GGUF files are not supported.",
        _table(["models", "Hugging Face", "GGUF", "differs from Llama by"], rows),
        "Models that also read pictures are loaded without that part, and a line in the log says "
        "so. Pictures in messages are refused.",
        vision,
        "Models with recurrent layers reuse a prefix up to a checkpoint of their states "
        "([kv_cache.md](kv_cache.md#recurrent-layers)).",
        "Models with latent attention run on CPUs and on CUDA, which has run them on no card yet "
        "([gpu.md](gpu.md#latents)).",
        "## Tensors and config.json",
        "Names of tensors may lack `model.`, as in embedding models (`Qwen3Model`), or have other "
        "prefixes, such as `language_model.model.` or `transformer.`.",
        "A key of config.json that changes the computation and is not built is refused with its "
        "value, and so is a tensor that the family does not use. A GGUF `llama` with an "
        "`expert_count` is a Mixtral.",
        "RoPE kinds are "
        f"{', '.join(ROPE_KINDS)}. With longrope, the engine chooses once per sequence, so that "
        "cached keys never change their meaning:",
        "* A prompt plus `max_tokens` that fits the original length uses the short factors, and a "
        "longer one the long factors from its first token on. transformers chooses for each call, "
        "by the length so far.\n"
        "* A request without `max_tokens` may fill the session, so it uses the long factors if "
        "`--session-len` exceeds the original length.\n"
        "* Sequences share cached prefixes only with those of the same choice.\n"
        "* A model with biases of K uses the long factors for all sequences of such a session, "
        "and so does a draft model.",
        "## KV formats",
        "Every family has every KV format on a CPU. The table has the KL divergence of the next "
        "token, in nats, from a 16-bit cache, in the tiny random model of each family, "
        "without a 16-bit window, rotation or calibration (`scripts/eval_families.py`, "
        "[results](../benchmarks/results/families_kl.jsonl)). With "
        "random weights, a small error may change a routed expert, and attention is as sharp as "
        "the norms happen to make it, so the figures compare formats within a family. "
        "[accuracy.md](accuracy.md) has those of a trained model.",
        _table_of_divergences(),
        "Refused by name, when the model is loaded:\n\n"
        "* on CUDA: every head_dim but 64, 80, 96, 128, 256 and the multiples of 16 from 272 to "
        "512 (Gemma 4 has 256 and 512). On a CPU, head_dim is a multiple of 16 up to 512.\n"
        "* a K calibration (`lmdeploy lite calibrate`) of a model whose layers differ in head_dim "
        "or KV heads.\n"
        "* Gemma 4 with `use_bidirectional_attention` all, or with another vocabulary of its "
        "per-layer inputs; Gemma 3n (AltUp, LAuReL, sparse activations).",
        "## Shared K and V",
        "In Gemma 4, the last `num_kv_shared_layers` layers read K and V of the last layer before "
        "them with the same type of attention. They take no bytes in the pools, in a prefix, in "
        "the store or in `--dry-run`, and they write nothing. A part of a prompt whose logits "
        "nobody reads stops after the last layer that stores K and V, which is 15 of 35 layers in "
        "E2B. If a layer has one matrix for K and V, it is loaded twice.",
        "## Tests",
        "Tests compare the logits of a small random model of every family with transformers, in "
        "FP32 (`tests/python/models`). The largest error is at most 3e-5 of the largest logit, in "
        "one step and in chunks, and greedy tokens are equal. InternLM is compared with a Llama "
        "that has its weights, because transformers does not include it.",
        "GGUF files of these models, with the names of llama.cpp's converter, give the same "
        "logits, and so does llama.cpp itself if `llama-cpp-python` is installed "
        "(`test_parity_llama_cpp.py`): within 1.1e-5, or 2.3e-3 in models with GELU, which "
        "llama.cpp reads from a 16-bit table. It decides by the number of layers whether an "
        "EXAONE 4 has windows, so that this family could not be compared.",
    )


PAGES = {
    "reference/flags.md": make_flags,
    "reference/fields.md": make_fields,
    "reference/limits.md": make_limits,
    "models.md": make_models,
}


def main() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()

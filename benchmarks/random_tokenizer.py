"""A byte-level BPE tokenizer of any size with a family's special tokens and a chat template.

Its vocabulary: 256 bytes, pairs of letters, made-up words that no text is cut into (a random model
answers with them), and the special tokens at the ids where the family has them. Ids between the
special tokens and the model's vocabulary size stand for nothing, as in published checkpoints.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmdeploy.chat.gguf_tokenizer import cut_patterns
from lmdeploy.chat.tokenizer import byte_alphabet

NORMAL, CONTROL, UNUSED = 1, 3, 5  # tokenizer.ggml.token_type


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a family; their ids are `first`, `first + 1` and so on."""

    cut: str  # tokenizer.ggml.pre
    first: int
    names: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str
    template: str
    more_eos: tuple[str, ...] = ()
    add_bos: bool = False


def _reserved(names: dict[int, str], *, first: int, last: int) -> tuple[str, ...]:
    return tuple(names.get(i, f"<|reserved_{i}|>") for i in range(first, last + 1))


_HARMONY_NAMES = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}
_HARMONY = """\
<|start|>system<|message|>You are a test model with random weights.
Current date: {{ strftime_now("%Y-%m-%d") }}

Reasoning: {{ reasoning_effort or "medium" }}

# Valid channels: analysis, commentary, final.<|end|>
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- "<|start|>functions." + (message.name or "tool") + " to=assistant" }}
        {{- "<|channel|>commentary<|message|>" + message.content + "<|end|>" }}
    {%- elif message.role == "assistant" %}
        {%- for call in message.tool_calls or [] %}
            {{- "<|start|>assistant to=functions." + call.function.name }}
            {{- "<|channel|>commentary json<|message|>" }}
            {{- call.function.arguments if call.function.arguments is string
                else call.function.arguments | tojson }}
            {{- "<|call|>" }}
        {%- endfor %}
        {%- if message.content %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- else %}
        {{- "<|start|>" + ("developer" if message.role == "system" else message.role) }}
        {{- "<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
_CHATML = """\
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
_HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
{{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
{{- message.content + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}"""
_INSTRUCT = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "assistant" %}{{ " " + message.content + eos_token }}
{%- else %}{{ "[INST] " + message.content + " [/INST]" }}
{%- endif %}
{%- endfor %}"""

_GPT_OSS = SpecialTokens(
    cut="gpt-4o",
    first=199998,
    names=_reserved(_HARMONY_NAMES, first=199998, last=200018),
    bos="<|startoftext|>",
    eos="<|return|>",
    pad="<|endoftext|>",
    more_eos=("<|endoftext|>", "<|call|>"),
    template=_HARMONY,
)
_LLAMA3 = SpecialTokens(
    cut="llama-bpe",
    first=128000,
    names=_reserved(
        {
            128000: "<|begin_of_text|>",
            128001: "<|end_of_text|>",
            128006: "<|start_header_id|>",
            128007: "<|end_header_id|>",
            128009: "<|eot_id|>",
        },
        first=128000,
        last=128009,
    ),
    bos="<|begin_of_text|>",
    eos="<|end_of_text|>",
    pad="<|end_of_text|>",
    more_eos=("<|eot_id|>",),
    template=_HEADERS,
    add_bos=True,
)
_QWEN = SpecialTokens(
    cut="qwen2",
    first=151643,
    names=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos=None,
    eos="<|im_end|>",
    pad="<|endoftext|>",
    more_eos=("<|endoftext|>",),
    template=_CHATML,
)
_MISTRAL = SpecialTokens(
    cut="gpt-2",
    first=0,
    names=("<unk>", "<s>", "</s>"),
    bos="<s>",
    eos="</s>",
    pad="<unk>",
    template=_INSTRUCT,
    add_bos=True,
)
FAMILIES = {
    "GptOssForCausalLM": _GPT_OSS,
    "LlamaForCausalLM": _LLAMA3,
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN,
    "Qwen3MoeForCausalLM": _QWEN,
}


@dataclass(frozen=True)
class RandomTokenizer:
    """Tokens by id, without the special ones after them or before them, and the family's."""

    special: SpecialTokens
    first_special: int
    words: tuple[str, ...]  # in the order of their ids
    merges: tuple[tuple[str, str], ...]
    vocab_size: int

    @classmethod
    def of(cls, architecture: str, vocab_size: int) -> RandomTokenizer:
        """For a model with that many logits. ValueError when they are too few."""
        special = FAMILIES[architecture]
        first = min(special.first, vocab_size - len(special.names))
        count = first or vocab_size - len(special.names)
        alphabet = sorted(byte_alphabet())
        if count < len(alphabet):
            least = len(alphabet) + len(special.names)
            raise ValueError(f"vocab_size: got {vocab_size}, wanted at least {least}")
        starts = "Ġ" + string.ascii_lowercase
        pairs = [(a, b) for a in starts for b in string.ascii_lowercase][: count - len(alphabet)]
        words = alphabet + [a + b for a, b in pairs]
        words += [f"Ġw{i}" for i in range(count - len(words))]
        return cls(special, first, tuple(words), tuple(pairs), vocab_size)

    def id_of(self, special: str) -> int:
        """The id of a special token."""
        return self.first_special + self.special.names.index(special)

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end an answer, the most usual first."""
        return [self.id_of(name) for name in (self.special.eos, *self.special.more_eos)]

    def token_ids(self) -> dict[str, int]:
        """Words → ids."""
        start = len(self.special.names) if self.first_special == 0 else 0
        return {word: start + i for i, word in enumerate(self.words)}

    def save(self, folder: Path) -> None:
        """tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json."""
        self._backend().save(str(folder / "tokenizer.json"))
        special = self.special
        ids: dict[str, Any] = {
            "eos_token_id": self.eos_ids,
            "pad_token_id": self.id_of(special.pad),
        }
        names = {"eos_token": special.eos, "pad_token": special.pad}
        if special.bos is not None:
            ids["bos_token_id"], names["bos_token"] = self.id_of(special.bos), special.bos
        _write_json(
            folder / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            | names,
        )
        _write_json(folder / "generation_config.json", ids)
        (folder / "chat_template.jinja").write_text(special.template, encoding="utf-8")

    def _backend(self) -> Any:
        from tokenizers import (
            AddedToken,
            Regex,
            Tokenizer,
            decoders,
            models,
            pre_tokenizers,
            processors,
        )

        special = self.special
        backend = Tokenizer(models.BPE(self.token_ids(), list(self.merges)))
        cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in cut_patterns(special.cut)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(n, special=True) for n in special.names])
        if special.add_bos and special.bos is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=[special.bos, "$A"], special_tokens=[(special.bos, self.id_of(special.bos))]
            )
        return backend

    def add_to_gguf(self, writer: Any) -> None:
        """The keys under `tokenizer.`, as llama.cpp's converter names them."""
        special = self.special
        tokens = [f"[PAD{i}]" for i in range(self.vocab_size)]
        kinds = [UNUSED] * self.vocab_size
        for word, token_id in self.token_ids().items():
            tokens[token_id], kinds[token_id] = word, NORMAL
        for name in special.names:
            tokens[self.id_of(name)], kinds[self.id_of(name)] = name, CONTROL
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(special.cut)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([f"{left} {right}" for left, right in self.merges])
        if special.bos is not None:
            writer.add_bos_token_id(self.id_of(special.bos))
            writer.add_add_bos_token(special.add_bos)
        writer.add_eos_token_id(self.id_of(special.eos))
        writer.add_pad_token_id(self.id_of(special.pad))
        writer.add_chat_template(special.template)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

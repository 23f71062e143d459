"""A byte-level BPE tokenizer of any size, with special tokens and a chat template.

The vocabulary has the 256 bytes, pairs of letters, words that no text produces (a random model
answers with them), and special tokens. Those of GPT-OSS have the ids of the published model; other
models get the tokens of ChatML. Unused ids follow up to the vocabulary size of the model.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import write_json

from lmdeploy.chat.gguf_pretokenizers import PRE_TOKENIZERS
from lmdeploy.chat.tokenizer import byte_alphabet

# `tokens` are consecutive ids from `first` on; a number between them stands for that many reserved
# tokens. The first of `eos` is the end of an answer.
GPT_OSS: dict[str, Any] = {
    "pre": "gpt-4o",
    "first": 199998,
    "tokens": [
        *("<|startoftext|>", "<|endoftext|>", 2, "<|return|>", "<|constrain|>", 1, "<|channel|>"),
        *("<|start|>", "<|end|>", "<|message|>", 3, "<|call|>", 5, "<|endofprompt|>"),
    ],
    "eos": ["<|return|>", "<|endoftext|>", "<|call|>"],
    "template": (
        '<|start|>system<|message|>Reasoning: {{ reasoning_effort or "medium" }}\n\n'
        "# Valid channels: analysis, commentary, final.<|end|>"
        "{% for message in messages %}"
        '{{ "<|start|>" + ("developer" if message.role == "system" else message.role) }}'
        '{{ "<|channel|>final" if message.role == "assistant" }}'
        '{{ "<|message|>" + message.content + "<|end|>" }}{% endfor %}'
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}
CHAT_ML: dict[str, Any] = {
    "pre": "qwen2",
    "first": 1 << 31,  # at the end of the vocabulary
    "tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "eos": ["<|im_end|>", "<|endoftext|>"],
    "template": (
        "{% for message in messages %}"
        '{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}'
        '{% endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}'
    ),
}
NORMAL, CONTROL, UNUSED = 1, 3, 5  # tokenizer.ggml.token_type


@dataclass(frozen=True)
class RandomTokenizer:
    """Ids of words and special tokens. `family` is GPT_OSS or CHAT_ML."""

    family: dict[str, Any]
    special_ids: dict[str, int]
    words: dict[str, int]
    merges: list[tuple[str, str]]
    vocab_size: int

    @classmethod
    def of(cls, architecture: str, vocab_size: int) -> RandomTokenizer:
        """Make the tokenizer of a model. Raise ValueError for too small a vocabulary."""
        family = GPT_OSS if architecture == "GptOssForCausalLM" else CHAT_ML
        names: list[str] = []
        for token in family["tokens"]:
            reserved = range(token) if isinstance(token, int) else ()
            names += [f"<|reserved_{len(names) + i}|>" for i in reserved] or [token]
        alphabet = sorted(byte_alphabet())
        if vocab_size < (least := len(alphabet) + len(names)):
            raise ValueError(f"vocab_size {vocab_size} is too small; it must be at least {least}.")
        first = min(family["first"], vocab_size - len(names))
        letters = string.ascii_lowercase
        merges = [(a, b) for a in "Ġ" + letters for b in letters][: first - len(alphabet)]
        words = alphabet + [a + b for a, b in merges]
        words += [f"Ġw{i}" for i in range(first - len(words))]
        return cls(
            family,
            {name: first + i for i, name in enumerate(names)},
            {word: i for i, word in enumerate(words)},
            merges,
            vocab_size,
        )

    def config_ids(self) -> dict[str, Any]:
        """Return the ids that config.json and generation_config.json name."""
        return {"eos_token_id": [self.special_ids[name] for name in self.family["eos"]]}

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, its configs and the chat template into a folder."""
        self.backend().save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": self.family["eos"][0],
        }
        write_json(folder / "tokenizer_config.json", settings)
        write_json(folder / "generation_config.json", self.config_ids())
        (folder / "chat_template.jinja").write_text(self.family["template"], encoding="utf-8")

    def backend(self) -> Any:
        """Return the tokenizer of the `tokenizers` library."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
        from tokenizers import pre_tokenizers as pre

        backend = Tokenizer(models.BPE(self.words, self.merges))
        cuts = [
            pre.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[self.family["pre"]].patterns
        ]
        backend.pre_tokenizer = pre.Sequence(
            [*cuts, pre.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(n, special=True) for n in self.special_ids])
        return backend

    def add_to_gguf(self, writer: Any) -> None:
        """Write the keys under `tokenizer.`, as llama.cpp's converter names them."""
        tokens = [f"[PAD{i}]" for i in range(self.vocab_size)]
        kinds = [UNUSED] * self.vocab_size
        for ids, kind in ((self.words, NORMAL), (self.special_ids, CONTROL)):
            for name, token_id in ids.items():
                tokens[token_id], kinds[token_id] = name, kind
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.family["pre"])
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([f"{left} {right}" for left, right in self.merges])
        writer.add_add_bos_token(False)
        writer.add_eos_token_id(self.special_ids[self.family["eos"][0]])
        writer.add_chat_template(self.family["template"])

"""A byte-level BPE tokenizer of any size with the special tokens and chat template of a family.

The vocabulary has the 256 bytes, pairs of letters, words that no text produces (a random model
answers with them), and the special tokens at the ids of the family. Unused ids follow up to the
vocabulary size of the model, as in published checkpoints.
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lmdeploy.chat.gguf_pretokenizers import PRE_TOKENIZERS
from lmdeploy.chat.tokenizer import byte_alphabet

FAMILIES = Path(__file__).with_name("checkpoint_tokenizers.yaml")
NORMAL, CONTROL, UNUSED = 1, 3, 5  # tokenizer.ggml.token_type


@dataclass(frozen=True)
class RandomTokenizer:
    """Ids of words and special tokens. `family` is an entry of checkpoint_tokenizers.yaml."""

    family: dict[str, Any]
    special_ids: dict[str, int]
    words: dict[str, int]
    merges: list[tuple[str, str]]
    vocab_size: int

    @classmethod
    def of(cls, architecture: str, vocab_size: int) -> RandomTokenizer:
        """Make the tokenizer of a model. ValueError is raised for too small a vocabulary."""
        families = yaml.safe_load(FAMILIES.read_text(encoding="utf-8")).values()
        family = next(f for f in families if architecture in f["architectures"])
        names: list[str] = []
        for token in family["tokens"]:
            reserved = range(token) if isinstance(token, int) else ()
            names += [f"<|reserved_{len(names) + i}|>" for i in reserved] or [token]
        alphabet = sorted(byte_alphabet())
        if vocab_size < (least := len(alphabet) + len(names)):
            raise ValueError(f"vocab_size {vocab_size} is too small; it must be at least {least}.")
        first = min(family["first"], vocab_size - len(names))
        count = first or vocab_size - len(names)
        letters = string.ascii_lowercase
        merges = [(a, b) for a in "Ġ" + letters for b in letters][: count - len(alphabet)]
        words = alphabet + [a + b for a, b in merges]
        words += [f"Ġw{i}" for i in range(count - len(words))]
        start = 0 if first else len(names)
        return cls(
            family,
            {name: first + i for i, name in enumerate(names)},
            {word: start + i for i, word in enumerate(words)},
            merges,
            vocab_size,
        )

    def config_ids(self) -> dict[str, Any]:
        """Return the ids that config.json and generation_config.json name."""
        family = self.family
        ids = {
            "eos_token_id": [self.special_ids[name] for name in family["eos"]],
            "pad_token_id": self.special_ids[family["pad"]],
        }
        return ids | ({"bos_token_id": self.special_ids[family["bos"]]} if family["bos"] else {})

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, its configs and the chat template into a folder."""
        family = self.family
        self.backend().save(str(folder / "tokenizer.json"))
        names = {"eos_token": family["eos"][0], "pad_token": family["pad"]}
        names |= {"bos_token": family["bos"]} if family["bos"] else {}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name, value in (
            ("tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": False, **names}),
            ("generation_config.json", self.config_ids()),
        ):
            (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        (folder / "chat_template.jinja").write_text(family["template"], encoding="utf-8")

    def backend(self) -> Any:
        """Return the tokenizer of the `tokenizers` library."""
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, processors
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
        if self.family["add_bos"]:
            bos = self.family["bos"]
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, self.special_ids[bos])]
            )
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
        if self.family["bos"]:
            writer.add_bos_token_id(self.special_ids[self.family["bos"]])
            writer.add_add_bos_token(self.family["add_bos"])
        writer.add_eos_token_id(self.special_ids[self.family["eos"][0]])
        writer.add_pad_token_id(self.special_ids[self.family["pad"]])
        writer.add_chat_template(self.family["template"])

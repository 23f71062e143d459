"""The tokenizer of a model, with the interface of LMDeploy 0.18's. It reads no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lmdeploy.base.checks import check_bool


class TokenizedTexts(NamedTuple):
    """The result of calling a Tokenizer."""

    input_ids: list[int] | list[list[int]]


class Tokenizer:
    """A tokenizer. Immutable; any thread may use it.

    Args:
        model_path: a Hugging Face folder, a GGUF file, a hub id, or `smollm2`.
        trust_remote_code: has no effect, because code of a checkpoint is never run.

    Raises:
        ValueError: if the tokenizer cannot be loaded.
    """

    def __init__(self, model_path: str, trust_remote_code: bool = False) -> None:
        from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
        from lmdeploy.chat.tokenizer import tokenizer_from_folder
        from lmdeploy.checkpoint.files.gguf_file import GgufFile
        from lmdeploy.checkpoint.hub import resolve_model

        check_bool("trust_remote_code", trust_remote_code)
        path = resolve_model(model_path)
        if path.is_file():
            self._tokenizer = tokenizer_from_gguf(GgufFile(path).metadata, str(path))
        else:
            self._tokenizer = tokenizer_from_folder(path)

    @property
    def vocab_size(self) -> int:
        """Return the largest id plus one."""
        return self._tokenizer.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """Return the id at the beginning of a text, or None."""
        return self._tokenizer.bos_id

    @property
    def eos_token_id(self) -> int | None:
        """Return the first id that ends an answer, or None."""
        return next(iter(self._tokenizer.stop_ids), None)

    def encode(self, s: str, add_bos: bool = True, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            s: the text.
            add_bos: begin with the BOS token, if the model uses one.
            add_special_tokens: False adds no BOS token either.
        """
        return list(self._tokenizer.encode(s, add_special=add_bos and add_special_tokens))

    def decode(
        self, t: Sequence[int], offset: int | None = None, *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of the ids from `offset` on."""
        return self._tokenizer.decode(list(t)[offset or 0 :], skip_special=skip_special_tokens)

    def __call__(self, s: str | Sequence[str]) -> TokenizedTexts:
        """Return the ids of one text or of several."""
        if isinstance(s, str):
            return TokenizedTexts(self.encode(s))
        return TokenizedTexts([self.encode(text) for text in s])

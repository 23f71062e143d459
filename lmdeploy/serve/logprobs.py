"""⑨ Log probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmdeploy.tokenizer import Tokenizer

# JSON has no -inf; OpenAI's API uses this value for "impossible".
_LOWEST = -9999.0


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """A token's text (U+FFFD for half characters) and bytes; empty for padding ids."""
    data = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
    return data.decode("utf-8", "replace"), list(data)


def chat_logprobs(
    tokenizer: Tokenizer, tokens: list[int], *, logprobs: list[dict[int, float]], num_top: int
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/chat/completions."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text, data = token_text(tokenizer, token)
        return {"token": text, "bytes": data, "logprob": max(value, _LOWEST)}

    content = []
    for token, values in zip(tokens, logprobs, strict=True):
        top = sorted(values.items(), key=lambda item: -item[1])[:num_top]
        content.append(
            {**entry(token, values[token]), "top_logprobs": [entry(t, v) for t, v in top]}
        )
    return {"content": content}


class CompletionLogprobs:
    """`choices[].logprobs` of /v1/completions; keeps the text offset across pieces."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0

    def body(self, tokens: list[int], logprobs: list[dict[int, float] | None]) -> dict[str, Any]:
        """`logprobs[i]` is None for a token that nothing predicts (the first of a prompt)."""
        result: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, values in zip(tokens, logprobs, strict=True):
            text, _ = token_text(self._tokenizer, token)
            result["tokens"].append(text)
            result["text_offset"].append(self._offset)
            self._offset += len(text)
            if values is None:
                result["token_logprobs"].append(None)
                result["top_logprobs"].append(None)
                continue
            result["token_logprobs"].append(max(values[token], _LOWEST))
            top = sorted(values.items(), key=lambda item: -item[1])[: self._num_top]
            result["top_logprobs"].append(
                {token_text(self._tokenizer, t)[0]: max(v, _LOWEST) for t, v in top}
            )
        return result

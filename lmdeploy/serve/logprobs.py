"""⑨ Log probabilities in the formats of the two OpenAI endpoints."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from lmdeploy.chat.detokenize import TokenDetokenizer

if TYPE_CHECKING:
    from lmdeploy.chat.tokenizer import Tokenizer
    from lmdeploy.response import Response

# JSON has no -inf; OpenAI's API uses this value for "impossible".
LOWEST = -9999.0


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """Return a token's text and bytes. Both are empty for padding ids.

    Bytes that are not UTF-8 on their own become U+FFFD in the text.
    """
    data = _token_bytes(tokenizer, token)
    return data.decode("utf-8", "replace"), list(data)


def _token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""


def token_logprobs(answer: Response) -> list[list[float]]:
    """Return `output_token_logprobs` of LMDeploy: log probability and id of every token."""
    pairs = zip(answer.token_ids, answer.logprobs or [], strict=True)
    return [[max(item[token], LOWEST), token] for token, item in pairs]


def chat_logprobs(
    tokenizer: Tokenizer, tokens: list[int], *, logprobs: list[dict[int, float]], num_top: int
) -> dict[str, Any]:
    """Return `choices[].logprobs` of /v1/chat/completions.

    Args:
        tokens: the generated tokens.
        logprobs: for each token, token id → log probability; contains the generated token.
        num_top: number of the most likely tokens to list.
    """

    def entry(token: int, value: float) -> dict[str, Any]:
        text, data = token_text(tokenizer, token)
        return {"token": text, "bytes": data, "logprob": max(value, LOWEST)}

    content = []
    for token, values in zip(tokens, logprobs, strict=True):
        top = sorted(values.items(), key=lambda item: -item[1])[:num_top]
        content.append(
            {**entry(token, values[token]), "top_logprobs": [entry(t, v) for t, v in top]}
        )
    return {"content": content}


def _completion_token(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text or, as OpenAI does, `bytes:\\xf0\\x9f` if it is not UTF-8."""
    data = _token_bytes(tokenizer, token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """Builds `choices[].logprobs` of /v1/completions and keeps the text offset across chunks.

    `text_offset` is the position of a token's text in the text of the choice. A token without
    text, such as BOS, has the offset of the next token. `top_logprobs` contains the sampled token
    in addition to the `num_top` most likely tokens.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._answer = TokenDetokenizer(tokenizer, skip_special, begins_text=False)
        self._offset = 0
        self._body = _empty_body()

    def add_prompt(
        self, tokens: list[int], logprobs: list[dict[int, float] | None], *, text: str
    ) -> None:
        """Add an echoed prompt and its text.

        `logprobs[0]` is None because no position predicts the first token. An aborted request may
        have fewer log probabilities than tokens.
        """
        # A BOS that the tokenizer added has no text. A BOS written in the prompt has.
        bos = self._tokenizer.bos_token
        spelled = [token_text(self._tokenizer, token)[0] == bos for token in tokens[:2]]
        is_added = bool(bos) and spelled[:1] == [True]
        is_added = is_added and (not text.startswith(bos) or spelled[1:] == [True])
        stream = TokenDetokenizer(self._tokenizer, skip_special=False, begins_text=True)
        for i, (token, values) in enumerate(zip_longest(tokens, logprobs[: len(tokens)])):
            self._add(token, values, text="" if is_added and i == 0 else stream.push(token))
        self._offset = len(text)

    def add_answer(self, tokens: list[int], logprobs: list[dict[int, float]]) -> None:
        """Add the tokens of one chunk."""
        for token, values in zip(tokens, logprobs, strict=True):
            self._add(token, values, text=self._answer.push(token))

    def take(self) -> dict[str, Any]:
        """Return the JSON object of everything added since the last call."""
        body, self._body = self._body, _empty_body()
        return body

    def _add(self, token: int, values: dict[int, float] | None, *, text: str) -> None:
        body = self._body
        name = _completion_token(self._tokenizer, token)
        body["tokens"].append(name)
        body["text_offset"].append(self._offset)
        self._offset += len(text)
        if values is None:
            body["token_logprobs"].append(None)
            body["top_logprobs"].append(None)
            return
        body["token_logprobs"].append(max(values[token], LOWEST))
        # The keys are texts. If tokens share a text, the sampled token wins, then the likeliest.
        named = {name: max(values[token], LOWEST)}
        for other, value in sorted(values.items(), key=lambda item: -item[1])[: self._num_top]:
            named.setdefault(_completion_token(self._tokenizer, other), max(value, LOWEST))
        body["top_logprobs"].append(dict(sorted(named.items(), key=lambda item: -item[1])))


def _empty_body() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

"""POST /v1/encode: returns the token ids of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.prompts import encode_chat, encode_text
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.serve.errors import JsonResponse
from lmdeploy.serve.routes.base import ApiRouter, post, state_of, until_disconnect
from lmdeploy.serve.schema import MAX_PROMPTS, ApiRequest, ManyTexts

MAX_ENCODED_TOKENS = 1 << 22  # in one response

router = ApiRouter()


class EncodeRequest(ApiRequest):
    """Body of POST /v1/encode."""

    input: str | ManyTexts
    do_preprocess: bool | None = False
    add_bos: bool | None = True


@post(router, "/v1/encode", body=EncodeRequest, needs_slot=True)
async def encode(request: Request, body: EncodeRequest) -> Response:
    """Return the token ids of the texts in `input`."""
    state = state_of(request)
    texts = [body.input] if isinstance(body.input, str) else body.input
    with state.admission.enter():
        work = encode_texts(texts, lambda text: _encode_one(state.engine, body, text=text))
        try:
            ids = await until_disconnect(request, work)
        except OptionError as error:
            raise error.renamed("input") from error
        reply: dict[str, Any] = {"input_ids": ids, "length": [len(item) for item in ids]}
        if isinstance(body.input, str):
            reply = {"input_ids": ids[0], "length": len(ids[0])}
        return await asyncio.to_thread(JsonResponse, reply)


async def encode_texts(texts: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the token ids of each text.

    Raise OptionError for more than MAX_PROMPTS texts or MAX_ENCODED_TOKENS tokens.
    """
    if len(texts) > MAX_PROMPTS:
        reason = f"contains {len(texts)} texts. It must contain at most {MAX_PROMPTS}."
        raise OptionError("input", reason)
    result: list[list[int]] = []
    num_tokens = 0
    for text in texts:
        result.append(await asyncio.to_thread(encode, text))
        num_tokens += len(result[-1])
        if num_tokens > MAX_ENCODED_TOKENS:
            reason = f"has {num_tokens} tokens in all. The limit is {MAX_ENCODED_TOKENS}."
            raise OptionError("input", reason)
    return result


def _encode_one(engine: AsyncEngine, body: EncodeRequest, *, text: str) -> list[int]:
    parts, limit = engine.text, MAX_ENCODED_TOKENS
    if body.do_preprocess:
        message = {"role": "user", "content": text}
        return encode_chat(parts, [message], max_tokens=limit).ids
    return encode_text(parts, text, add_special=body.add_bos is not False, max_tokens=limit)

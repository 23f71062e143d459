"""POST /v1/embeddings and /pooling: the final hidden state of texts as vectors."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.base.checks import OptionError
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.config.unsupported import EMBEDDING, unsupported_body_fields
from lmdeploy.response import Response as Answer
from lmdeploy.serve.errors import JsonResponse
from lmdeploy.serve.jobs import Job, PreparedRequest, Usage, encode_prompts
from lmdeploy.serve.routes.base import ApiRouter, check_model, post, run_prompts, state_of
from lmdeploy.serve.schema import ApiRequest, Prompts, Unsupported
from lmdeploy.serve.state import ServerState

router = ApiRouter()
Vector = npt.NDArray[np.float32]


class PoolingRequest(ApiRequest):
    """Body of POST /pooling."""

    unsupported: ClassVar[Unsupported] = unsupported_body_fields(EMBEDDING)

    input: str | Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(default=None, ge=1, lt=2**31)
    pooling: Literal["last", "mean"] | None = "last"
    normalize: bool | None = False
    cache_salt: str | None = Field(default=None, min_length=1)
    priority: int | None = Field(default=0, ge=-(2**31), lt=2**31)


class EmbeddingsRequest(PoolingRequest):
    """Body of POST /v1/embeddings."""

    normalize: bool | None = True


@post(router, "/v1/embeddings", body=EmbeddingsRequest, errors=(404,), needs_slot=True)
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Return the vector of each text in `input`, of length 1 unless `normalize` is false."""
    return await _respond(request, body, form=("embedding", "embedding"))


@post(router, "/pooling", body=PoolingRequest, errors=(404,), needs_slot=True)
async def pooling(request: Request, body: PoolingRequest) -> Response:
    """Return the vector of each text in `input` as the model computes it."""
    return await _respond(request, body, form=("pooling", "data"))


async def _respond(request: Request, body: PoolingRequest, *, form: tuple[str, str]) -> Response:
    """Return the vectors. `form` has the type of an item and the field of its vector."""
    state = state_of(request)
    if body.model is not None:
        check_model(state, body.model)
    with state.admission.enter() as slot:
        jobs, answers = await run_prompts(request, _prepare(state, body), slot=slot)
        usage = Usage()
        for job, answer in zip(jobs, answers, strict=True):
            usage.add(job, answer)

        def reply() -> Response:
            tokens = usage.body()["prompt_tokens"]
            return JsonResponse(
                {
                    "object": "list",
                    "data": [
                        _item(job, answer, body=body, form=form)
                        for job, answer in zip(jobs, answers, strict=True)
                    ],
                    "model": state.model_name,
                    "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                }
            )

        return await asyncio.to_thread(reply)


async def _prepare(state: ServerState, body: PoolingRequest) -> PreparedRequest:
    """Make the prompts and the options. Raise OptionError for a bad field."""
    size = state.engine.text.hidden_size
    if (body.dimensions or 1) > size:
        raise OptionError(
            "dimensions", f"is {body.dimensions}, but the model's vectors have {size}. Lower it."
        )
    config = GenerationConfig(
        max_new_tokens=0,
        pooling=body.pooling or "last",
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
    )
    try:
        prompts = await encode_prompts(state.engine, body.input, num_new=0)
    except OptionError as error:
        raise error.renamed("input") from error
    return PreparedRequest(prompts, config)


def _item(
    job: Job, answer: Answer, *, body: PoolingRequest, form: tuple[str, str]
) -> dict[str, Any]:
    if answer.embedding is None:
        raise RuntimeError("The engine returned no hidden state.")
    vector = _finish(answer.embedding, body)
    value: Any = vector.tolist()
    if body.encoding_format == "base64":
        value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    kind, field = form
    return {"object": kind, "index": job.prompt_index, field: value}


def _finish(vector: Vector, body: PoolingRequest) -> Vector:
    """Return the first `dimensions` values of a vector, scaled to length 1 if wanted.

    Values that are not finite become 0, because JSON has no other numbers.
    """
    vector = np.nan_to_num(vector[: body.dimensions], posinf=0.0, neginf=0.0)
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / np.float32(length) if body.normalize and length > 0 else vector

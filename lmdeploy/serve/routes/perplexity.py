"""POST /get_ppl: the mean cross-entropy loss of a text, as in LMDeploy."""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.base.checks import OptionError
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.serve.errors import ApiError, JsonResponse
from lmdeploy.serve.jobs import PreparedRequest, encode_prompts
from lmdeploy.serve.routes.base import ApiRouter, post, run_prompts, state_of
from lmdeploy.serve.schema import ApiRequest, Ids
from lmdeploy.serve.state import ServerState

router = ApiRouter()


class PerplexityRequest(ApiRequest):
    """Body of POST /get_ppl."""

    input: str | Ids


@post(router, "/get_ppl", body=PerplexityRequest, needs_slot=True)
async def get_ppl(request: Request, body: PerplexityRequest) -> Response:
    """Return the mean negative log likelihood per token of `input`, in nats.

    As in LMDeploy, this is the logarithm of the perplexity. The first token is not scored.
    """
    state = state_of(request)
    with state.admission.enter() as slot:
        jobs, answers = await run_prompts(request, _prepare(state, body), slot=slot)
        ids, logprobs = jobs[0].stream.prompt_ids, answers[0].prompt_logprobs or []
        values = [item[token] for token, item in zip(ids[1:], logprobs, strict=True)]
        loss = -sum(values) / len(values)
        if not math.isfinite(loss):
            raise ApiError(500, "The loss is not finite.")
        return JsonResponse({"ppl": loss})


async def _prepare(state: ServerState, body: PerplexityRequest) -> PreparedRequest:
    """Make the prompt. Raise OptionError if it is wrong."""
    try:
        prompts = await encode_prompts(state.engine, body.input, num_new=0)
    except OptionError as error:
        raise error.renamed("input") from error
    if len(prompts) != 1 or len(prompts[0]) < 2:
        raise OptionError("input", "has fewer than 2 tokens. The first one is not scored.")
    return PreparedRequest(prompts, GenerationConfig(max_new_tokens=0, prompt_logprobs=0))

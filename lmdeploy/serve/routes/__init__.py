"""The endpoints, one module per group. Add the router of a new module to ROUTERS."""

from lmdeploy.serve.routes import (
    admin,
    chat,
    completions,
    embeddings,
    encode,
    engine_stats,
    generate,
    lifecycle,
    markdown,
    messages,
    perplexity,
    responses,
    web,
)
from lmdeploy.serve.routes.base import ApiRouter

ROUTERS: tuple[ApiRouter, ...] = (
    admin.router,
    chat.router,
    completions.router,
    generate.router,
    messages.router,
    responses.router,
    embeddings.router,
    perplexity.router,
    lifecycle.router,
    encode.router,
    engine_stats.router,
    markdown.router,
    web.router,
)

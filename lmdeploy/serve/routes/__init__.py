"""The endpoints, one module per group. Add the router of a new module to ROUTERS."""

from lmdeploy.serve.routes import (
    admin,
    chat,
    completions,
    encode,
    engine_stats,
    generate,
    markdown,
    messages,
    responses,
    web,
)

ROUTERS = (
    admin.router,
    chat.router,
    completions.router,
    generate.router,
    messages.router,
    responses.router,
    encode.router,
    engine_stats.router,
    markdown.router,
    web.router,
)

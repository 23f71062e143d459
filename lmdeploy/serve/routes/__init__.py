"""The endpoints, one module per group. Add the router of a new module to ROUTERS."""

from lmdeploy.serve.routes import admin, chat, completions, encode, generate

ROUTERS = (admin.router, chat.router, completions.router, generate.router, encode.router)

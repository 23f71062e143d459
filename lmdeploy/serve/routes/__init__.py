"""The endpoints: one module per group. A new module is added to ROUTERS."""

from lmdeploy.serve.routes import admin, chat, completions, encode, generate

ROUTERS = (admin.router, chat.router, completions.router, generate.router, encode.router)

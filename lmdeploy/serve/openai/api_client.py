"""A client of the HTTP server with the interface of LMDeploy 0.18's. It needs no other package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

# LMDeploy's client sends these values if the caller gives none.
_CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 1.0, "max_tokens": 512}
_COMPLETION_DEFAULTS = {"temperature": 0.7, "top_p": 1.0, "top_k": 40, "max_tokens": 16}


def get_model_list(
    api_url: str, headers: dict[str, str] | None = None, *, timeout: float | None = None
) -> list[str]:
    """Return the names of the models at `api_url`, such as http://127.0.0.1:23333/v1/models.

    Raises ValueError if the server rejects the request, and OSError if it cannot be reached.
    """
    with closing(_open(Request(api_url, headers=headers or {}), timeout=timeout)) as response:
        value = _object_in(response, url=api_url)
    return [card["id"] for card in value["data"]]


class APIClient:
    """Sends requests to an api_server.

    Args:
        api_server_url: address of the server, such as http://127.0.0.1:23333.
        api_key: sent with every request. None sends no key.
        timeout: seconds to wait for each part of a response. None disables the limit.

    Every method raises OSError (URLError) if the server cannot be reached.
    """

    def __init__(
        self, api_server_url: str, api_key: str | None = None, *, timeout: float | None = None
    ) -> None:
        if urlsplit(api_server_url).scheme not in ("http", "https"):
            raise ValueError(
                f"api_server_url is {api_server_url[:100]!r}. It must begin with http:// or "
                "https://."
            )
        self.api_server_url = api_server_url.rstrip("/")
        self.chat_completions_v1_url = f"{self.api_server_url}/v1/chat/completions"
        self.completions_v1_url = f"{self.api_server_url}/v1/completions"
        self.models_v1_url = f"{self.api_server_url}/v1/models"
        self.encode_v1_url = f"{self.api_server_url}/v1/encode"
        self.generate_url = f"{self.api_server_url}/generate"
        self.api_key = api_key
        self.headers = {"content-type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._available_models: list[str] | None = None

    @property
    def available_models(self) -> list[str]:
        """Return the names of the served models, which are requested once."""
        if self._available_models is None:
            self._available_models = get_model_list(
                self.models_v1_url, self.headers, timeout=self._timeout
            )
        return self._available_models

    def encode(
        self, input: str | list[str], do_preprocess: bool = False, *, add_bos: bool = True
    ) -> tuple[Any, Any]:
        """Return (input_ids, length), or lists of both if `input` is a list.

        Args:
            input: one or several texts.
            do_preprocess: apply the chat template.
            add_bos: begin with the BOS token.

        Raises:
            ValueError: if the server rejects the request.
        """
        body = {"input": input, "do_preprocess": do_preprocess, "add_bos": add_bos}
        answer = self._object(self.encode_v1_url, body)
        return answer["input_ids"], answer["length"]

    def chat_completions_v1(
        self, model: str, messages: str | list[dict[str, Any]], **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the response of /v1/chat/completions, or its chunks with `stream=True`.

        `options` are fields of the request. If the server rejects it, yield the error object.
        """
        body = {**_CHAT_DEFAULTS, **options, "model": model, "messages": messages}
        return self._objects(self.chat_completions_v1_url, body)

    def completions_v1(
        self, model: str, prompt: str | list[Any], **options: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the response of /v1/completions, or its chunks with `stream=True`.

        `options` are fields of the request. If the server rejects it, yield the error object.
        """
        body = {**_COMPLETION_DEFAULTS, **options, "model": model, "prompt": prompt}
        return self._objects(self.completions_v1_url, body)

    def generate(self, prompt: str | None = None, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield the response of /generate, or its chunks with `stream=True`.

        `options` are fields of the request. If the server rejects it, yield the error object.
        """
        return self._objects(self.generate_url, {**options, "prompt": prompt})

    def _objects(self, url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with closing(self._open(url, body)) as response:
            if response.headers.get_content_type() != "text/event-stream":
                yield json.load(response)
                return
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    yield json.loads(data)

    def _object(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        with closing(self._open(url, body)) as response:
            return _object_in(response, url=url)

    def _open(self, url: str, body: dict[str, Any]) -> HTTPResponse | HTTPError:
        return _open(Request(url, json.dumps(body).encode(), self.headers), timeout=self._timeout)


def _open(request: Request, *, timeout: float | None = None) -> HTTPResponse | HTTPError:
    try:
        response: HTTPResponse = urlopen(request, timeout=timeout)
    except HTTPError as error:  # its body is the error object
        return error
    return response


def _object_in(response: HTTPResponse | HTTPError, *, url: str) -> dict[str, Any]:
    """Return the JSON object of a response. Raises ValueError if it is an error."""
    value: dict[str, Any] = json.load(response)
    if "error" in value:
        raise ValueError(f"{url} rejected the request: {value['error']['message']}")
    return value

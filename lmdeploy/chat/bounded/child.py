"""The process that tokenizes or renders. Run by path, so that it imports nothing of the package.

It reads requests from stdin and writes replies to stdout (see `_REQUEST` and `_REPLY`). A request
that exceeds its time ends the process by SIGALRM. One that exceeds its memory ends it by SIGABRT.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import struct
import sys
from array import array
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

_REQUEST = struct.Struct("<Q")  # bytes of the data; followed by the data
_REPLY = struct.Struct("<BQ")  # 0: the result, 1: an error; bytes of the rest; followed by the rest
MAX_SECONDS = 5.0
MAX_LOAD_SECONDS = 60
MAX_OUTPUT_CHARS = 64 << 20  # of a prompt
_MEMORY = 512 << 20
_MEMORY_PER_BYTE = 2048  # of the text; ordinary tokenizers need a few hundred
_MEMORY_PER_JSON_BYTE = 64  # an empty object takes 72 bytes for three of JSON
_MAX_TEMPLATES = 8
_MAX_REASON = 1000  # characters of an error that a template chooses
MARK_BYTES = 32

_Handler = Callable[[bytes], bytes]


def _limit(seconds: float, num_bytes: int) -> None:
    """Set the time until SIGALRM, and the memory that may be added."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + num_bytes
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _reply(error: int, data: bytes) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.buffer.write(_REPLY.pack(error, len(data)) + data)
    sys.stdout.buffer.flush()


def _reply_error(error: BaseException) -> None:
    _reply(1, str(error).encode(errors="replace"))


# --- tokenizers: a request is add_special as one byte, and the text ------------------------------


def _tokenizer(path: str) -> _Handler:
    """Return a function that tokenizes as the file says."""
    from tokenizers import Tokenizer

    _limit(MAX_LOAD_SECONDS, 2 * _MEMORY + 64 * os.path.getsize(path))
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def tokenize(data: bytes) -> bytes:
        text = data[1:].decode()
        found = tokenizer.encode_batch_fast([text], add_special_tokens=bool(data[0]))
        return array("I", found[0].ids).tobytes()

    return tokenize


# --- templates: a request is a mark, and JSON with `source` and `context` ------------------------


class _TemplateError(Exception):
    """An error that a template raises by raise_exception()."""


class _JsonObject(dict[str, Any]):
    """A parsed JSON object that templates can also use as the text that it came from.

    The filter `tojson` returns this text, and so do concatenation and output. So the prompt
    contains the text that the model wrote.
    """

    text: str

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


class _JsonText(str):
    """A text that the filter `tojson` inserts unchanged."""


def _json_text(text: str, is_parsed: bool) -> Any:
    """Return a value of a request that has the mark: an object if it is one and can be parsed."""
    if not is_parsed:
        return _JsonText(text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict):
        return text
    made = _JsonObject(value)
    made.text = text.strip()
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    *,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, _JsonText):
        return str(value)
    if isinstance(value, _JsonObject) and indent is None and separators is None and not sort_keys:
        return value.text
    # Unlike Jinja's own filter, this one does not escape for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise _TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _without_generation_marks(source: str) -> str:
    """Remove `{% generation %}`, which only marks text for training."""
    return re.sub(
        r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", r"{%\1 if true %}{% endif \2%}", source
    )


def _renderer() -> _Handler:
    """Return a function that renders templates in Jinja's sandbox, or only compiles them."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now

    @lru_cache(_MAX_TEMPLATES)
    def compiled(source: str) -> Template:
        try:
            return environment.from_string(_without_generation_marks(source))
        except (TemplateError, RecursionError, ValueError, SyntaxError) as error:
            raise _TemplateError(f"does not compile: {error}") from error

    def render(data: bytes) -> bytes:
        mark = data[:MARK_BYTES].decode()

        def unmark(value: dict[str, Any]) -> Any:
            return _json_text(*value[mark]) if mark in value else value

        text = data[MARK_BYTES:].decode(errors="surrogatepass")
        request = json.loads(text, object_hook=unmark)
        template = compiled(request["source"])
        if request["context"] is None:
            return b""
        try:
            text = template.render(request["context"])
        except (_TemplateError, TemplateError) as error:
            reason = str(error)[:_MAX_REASON]
            raise _TemplateError(f"is rejected by the chat template: {reason}") from error
        except MemoryError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON]
            raise _TemplateError(f"makes the chat template fail: {reason}") from error
        if len(text) > MAX_OUTPUT_CHARS:
            raise _TemplateError(f"makes a prompt of more than {MAX_OUTPUT_CHARS} characters")
        return text.encode(errors="surrogatepass")

    return render


def main(task: str, *arguments: str) -> None:
    """Prepare for the task, `tokenizer` or `template`, and answer requests until stdin ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it also ends code of the library
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine's process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory_per_byte = _MEMORY_PER_BYTE if task == "tokenizer" else _MEMORY_PER_JSON_BYTE
    try:
        handle = _tokenizer(*arguments) if task == "tokenizer" else _renderer()
    except BaseException as error:  # a panic is no Exception
        return _reply_error(error)
    _reply(0, b"")
    while header := sys.stdin.buffer.read(_REQUEST.size):
        (num_bytes,) = _REQUEST.unpack(header)
        data = sys.stdin.buffer.read(num_bytes)
        _limit(MAX_SECONDS, _MEMORY + memory_per_byte * num_bytes)
        try:
            result = handle(data)
        except MemoryError:
            os.abort()
        except BaseException as error:
            _reply_error(error)
        else:
            _reply(0, result)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The process that tokenizes. Run by path, so that it imports no other module of the package.

It reads requests from stdin and writes replies to stdout (see `_REQUEST` and `_REPLY`). A request
that exceeds its time ends the process by SIGALRM. One that exceeds its memory ends it by SIGABRT.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from array import array

_REQUEST = struct.Struct("<QB")  # bytes of the text, add_special; followed by the text
_REPLY = struct.Struct("<BQ")  # 0: ids, 1: an error; bytes of the rest; followed by the rest
MAX_SECONDS = 5
MAX_LOAD_SECONDS = 60
_MEMORY = 512 << 20
_MEMORY_PER_BYTE = 2048  # of the text; ordinary tokenizers need a few hundred


def _limit(seconds: int, num_bytes: int) -> None:
    """Set the time until SIGALRM, and the memory that may be added."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + num_bytes
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.alarm(seconds)


def _reply(error: int, data: bytes) -> None:
    signal.alarm(0)
    sys.stdout.buffer.write(_REPLY.pack(error, len(data)) + data)
    sys.stdout.buffer.flush()


def main(path: str) -> None:
    """Load the tokenizer and answer requests until stdin ends."""
    from tokenizers import Tokenizer

    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it also ends code of the library
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine's process
    try:
        _limit(MAX_LOAD_SECONDS, 2 * _MEMORY + 64 * os.path.getsize(path))
        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
    except BaseException as error:  # a panic is no Exception
        return _reply(1, str(error).encode())
    _reply(0, b"")
    while header := sys.stdin.buffer.read(_REQUEST.size):
        num_bytes, add_special = _REQUEST.unpack(header)
        text = sys.stdin.buffer.read(num_bytes).decode()
        _limit(MAX_SECONDS, _MEMORY + _MEMORY_PER_BYTE * num_bytes)
        try:
            found = tokenizer.encode_batch_fast([text], add_special_tokens=bool(add_special))
            data = array("I", found[0].ids).tobytes()
        except BaseException as error:
            _reply(1, str(error).encode())
        else:
            _reply(0, data)


if __name__ == "__main__":
    main(sys.argv[1])

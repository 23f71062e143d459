"""③⑨ Convert text to token ids, and token ids to text, at once or as a stream.

Ids are converted to bytes first, and bytes to text last. So a stream never splits a character, and
it returns the same text as decoding at once.
"""

from __future__ import annotations

import codecs
import json
import re
import shutil
import tempfile
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError
from lmdeploy.base.errors import ModelFormatError, UnavailableError
from lmdeploy.base.files import parse_json_object, read_json_object
from lmdeploy.chat.vocabulary.added_tokens import (
    StatedTokens,
    merged_tokens,
    read_stated_tokens,
    token_text,
)
from lmdeploy.chat.vocabulary.end_tokens import end_ids

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer as Backend

    from lmdeploy.chat.bounded.process import TokenizerPool

_MAX_CACHED_WORDS = 256  # per thread and tokenizer
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_CONFIG_BYTES = 16 << 20
_MAX_IDS = 1 << 31  # for any vocabulary
_LONG_TEXT = 4096  # characters
_MAX_REASON = 160  # characters of another library's error


def byte_alphabet() -> dict[str, int]:
    """Return a map from GPT-2's printable characters to the 256 bytes that they represent."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON escapes can produce, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@contextmanager
def library_errors(convert: Callable[[str], Exception]) -> Iterator[None]:
    """Raise convert(reason) for any error of a library in Rust, a panic included.

    A panic raises PanicException, which is not an Exception and which no module exports.
    """
    try:
        yield
    except UnavailableError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise convert(" ".join(str(error).split())[:_MAX_REASON].rstrip(".")) from error


def _cannot_tokenize(reason: str) -> OptionError:
    return OptionError(
        "prompt", f"contains text that the tokenizer of this model cannot process: {reason}."
    )


def _cannot_restrict(reason: str) -> OptionError:
    return OptionError(
        "response_format", f"cannot be used with the tokenizer of this model: {reason}."
    )


def _bound_cache(backend: Backend) -> None:
    """Let every thread keep fewer words than the library's 10,000, which take up to 10 MB.

    English takes a fifth longer with 256 words than with a thousand, code as long. A server has
    dozens of threads, whose words it never gives back. The library has no public name for this.
    """
    resize = getattr(backend.model, "_resize_cache", None)
    if resize is not None:
        resize(_MAX_CACHED_WORDS)


class Tokenizer:
    """A tokenizer of one model. Immutable; any thread may use it.

    Args:
        backend: a tokenizer of the library tokenizers, with post-processor (BOS) and decoder.
        eos_ids: ids that end an answer.
        bos_id: the id at the beginning of a text, or None.
        strip_first_space: remove the first space of decoded text (SentencePiece).
        pool: tokenizes instead of the backend, whose settings are not known to be fast.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Sequence[int],
        bos_id: int | None = None,
        strip_first_space: bool | None = None,
        pool: TokenizerPool | None = None,
    ) -> None:
        _bound_cache(backend)
        self._backend = backend
        self._pool = pool
        self.eos_ids = list(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        pieces, strip = _bytes_of_tokens(backend)
        self._max_token_bytes = max(map(len, pieces), default=1)
        # One buffer: separate objects would need ten times the bytes.
        self._all_bytes = b"".join(pieces)
        self._starts = array("I", accumulate(map(len, pieces), initial=0))
        self._strip_first_space = strip if strip_first_space is None else strip_first_space
        added = backend.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        contents = sorted({token.content for token in added.values() if token.content}, key=len)
        longest_first = "|".join(map(re.escape, reversed(contents)))
        self._added = re.compile(longest_first or r"(?!)")
        self._grammar_lock = threading.Lock()
        self._grammar_tokenizers: dict[int, LLTokenizer] = {}

    @property
    def vocab_size(self) -> int:
        """Return the largest id plus one."""
        return len(self._starts) - 1

    @property
    def max_token_bytes(self) -> int:
        """Return the number of bytes of the longest token."""
        return self._max_token_bytes

    @property
    def stop_ids(self) -> list[int]:
        """Return the ids that end an answer."""
        return list(self.eos_ids)

    @property
    def eos_token(self) -> str:
        """Return the text of the first end id, or "" if there is none."""
        return (self._backend.id_to_token(self.eos_ids[0]) or "") if self.eos_ids else ""

    @property
    def bos_token(self) -> str:
        """Return the text of the begin id, or "" if there is none."""
        return (self._backend.id_to_token(self.bos_id) or "") if self.bos_id is not None else ""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the ids of `text`. Special tokens that are spelled in it are recognized.

        `add_special` adds the special tokens around a text (BOS). A rendered chat template already
        has them. Raise OptionError if the library fails, and UnavailableError as TokenizerPool.
        """
        with library_errors(_cannot_tokenize):
            try:
                return self._encode(text, add_special)
            except (TypeError, UnicodeEncodeError):
                return self._encode(without_surrogates(text), add_special)

    def _encode(self, text: str, add_special: bool) -> list[int]:
        if self._pool is not None:
            return self._pool.encode(text, add_special)
        if len(text) < _LONG_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=add_special)
        else:  # only the batch call releases the GIL
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0]
        ids: list[int] = encoding.ids
        return ids

    def close(self) -> None:
        """End the processes that tokenize, if there are any. Texts cannot be encoded afterwards."""
        if self._pool is not None:
            self._pool.close()

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD. Raise ValueError for a bad id."""
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(token_id) for token_id in ids]) + stream.finish()

    def stream(
        self,
        skip_special: bool = True,
        *,
        begins_text: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> TextStream:
        """Return an incremental decoder.

        Args:
            skip_special: leave out special tokens other than those in `shown`.
            begins_text: the ids do not continue another text.
        """
        return TextStream(self, skip_special, begins_text=begins_text, shown=shown)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id, also of a special one. Raise ValueError for an unknown id."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"The token id is {token_id}. It must be 0 to {self.vocab_size - 1}.")
        return self._all_bytes[self._starts[token_id] : self._starts[token_id + 1]]

    def pieces(self, token_ids: Sequence[int], *, shown: frozenset[int] | None) -> list[bytes]:
        """Return the bytes of each id. Ids that only pad the model's vocabulary have none.

        `shown` are the special tokens that have bytes. None means all of them.
        """
        text, starts, end = self._all_bytes, self._starts, self.vocab_size
        hidden = self._special if shown is not None else ()
        return [
            text[starts[i] : starts[i + 1]]
            if i < end and (i not in hidden or i in (shown or ()))
            else b""
            for i in token_ids
        ]

    def is_special(self, token_id: int) -> bool:
        """Return whether the id is a control token."""
        return token_id in self._special

    def token_id(self, token: str) -> int | None:
        """Return the id of a token's text, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def split_added(self, text: str) -> list[int | str]:
        """Return the ids of added tokens that `text` spells, and the texts between them."""
        parts: list[int | str] = []
        at = 0
        for match in self._added.finditer(text):
            if match.start() > at:
                parts.append(text[at : match.start()])
            found = self.token_id(match.group())
            if found is None:
                raise RuntimeError(f"the vocabulary lacks the added token {match.group()!r}")
            parts.append(found)
            at = match.end()
        return [*parts, text[at:]] if at < len(text) else parts

    def grammar_tokenizer(self, vocab_size: int | None = None) -> LLTokenizer:
        """Return llguidance's form of this tokenizer. It is built once per size in about a second.

        `vocab_size` is the model's number of logits, if that exceeds the size of the tokenizer.
        """
        from llguidance import LLTokenizer

        size = max(vocab_size or 0, self.vocab_size)
        with self._grammar_lock:
            if size not in self._grammar_tokenizers:
                with library_errors(_cannot_restrict):
                    self._grammar_tokenizers[size] = LLTokenizer(
                        self._backend.to_str(), n_vocab=size, eos_token=self.eos_ids or None
                    )
            return self._grammar_tokenizers[size]

    @property
    def strips_first_space(self) -> bool:
        """Return whether the first space of a decoded text is removed (SentencePiece)."""
        return self._strip_first_space


class TextStream:
    """Decodes ids as they arrive, one or several at a time. Not thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool,
        *,
        begins_text: bool,
        shown: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = begins_text and tokenizer.strips_first_space
        # The ids since the last complete character. Only `push_all` counts them.
        self.num_open = 0

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes. Incomplete characters are held back."""
        piece = self._tokenizer.token_bytes(token_id)
        if self._skip_special and self._tokenizer.is_special(token_id):
            return self._decoder.decode(piece) if token_id in self._shown else ""
        if self._strip and piece:
            piece = piece.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(piece)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that ids complete. Ids that only pad the vocabulary have no text."""
        if self._strip:
            return "".join([self._push_open(token_id) for token_id in token_ids])
        shown = self._shown if self._skip_special else None
        pieces = self._tokenizer.pieces(token_ids, shown=shown)
        text = self._decoder.decode(b"".join(pieces))
        left = len(self._decoder.getstate()[0])
        if not left:
            self.num_open = 0
            return text
        for count, piece in enumerate(reversed(pieces), 1):
            left -= len(piece)
            if left <= 0:
                self.num_open = count
                return text
        self.num_open += len(pieces)  # the character began before these ids
        return text

    def _push_open(self, token_id: int) -> str:
        text = self.push(token_id) if token_id < self._tokenizer.vocab_size else ""
        self.num_open = self.num_open + 1 if self.pending else 0
        return text

    @property
    def pending(self) -> bool:
        """Return whether an incomplete character is held back."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """Return the rest of the text. Incomplete characters become U+FFFD."""
        return self._decoder.decode(b"", True)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder. It needs tokenizer.json.

    As in transformers 5, the post-processor of tokenizer.json adds special tokens around a text.
    add_bos_token and add_eos_token of tokenizer_config.json are ignored.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFormatError(
            f"{folder}: tokenizer.json is missing. Other tokenizer files (tokenizer.model, "
            "vocab.txt) are not supported. Save the tokenizer in its fast form."
        )
    stated = read_stated_tokens(folder)
    backend, pool = _backend_from_file(path, stated)
    configs = [
        read_json_object(folder / name, _MAX_CONFIG_BYTES)
        for name in ("generation_config.json", "config.json")
        if (folder / name).is_file()
    ]
    eos_ids = [token_id for config in configs for token_id in _id_list(config.get("eos_token_id"))]
    bos_ids = [token_id for config in configs for token_id in _id_list(config.get("bos_token_id"))]
    for key, ids in (("eos_token", eos_ids), ("bos_token", bos_ids)):
        text = token_text(stated.config.get(key))
        found = None if text is None else backend.token_to_id(text)
        if found is not None:
            ids.insert(0, found)
        elif key == "bos_token" and stated.config.get(key, "") is None:
            ids.clear()  # no BOS, even if the config has an id
    return Tokenizer(
        backend,
        eos_ids=end_ids(backend, eos_ids),
        bos_id=bos_ids[0] if bos_ids else None,
        pool=pool,
    )


def _backend_from_file(path: Path, stated: StatedTokens) -> tuple[Backend, TokenizerPool | None]:
    """Return the tokenizer, and the processes that tokenize if its settings may be slow."""
    from tokenizers import Tokenizer as BackendClass

    from lmdeploy.chat.bounded.process import TokenizerPool
    from lmdeploy.chat.bounded.settings import is_bounded

    settings = read_json_object(path, _MAX_TOKENIZER_BYTES)

    def not_a_tokenizer(reason: str) -> ModelFormatError:
        return ModelFormatError(f"{path}: The file is not a tokenizer: {reason}")

    with library_errors(not_a_tokenizer):
        added = merged_tokens(settings, stated)
        is_whole = added == (settings.get("added_tokens") or [])
        settings["added_tokens"] = added
        pool = None
        if not is_bounded(settings):
            pool = TokenizerPool(path) if is_whole else pool_of(settings)
            settings = _vocabulary_only(settings)
            is_whole = False
        backend: Backend = (
            BackendClass.from_file(str(path))
            if is_whole
            else BackendClass.from_str(json.dumps(settings))
        )
    backend.no_padding()
    backend.no_truncation()
    return backend, pool


def pool_of(settings: dict[str, Any]) -> TokenizerPool:
    """Return processes that read the settings from a file, which exists as long as the pool."""
    from lmdeploy.chat.bounded.process import TokenizerPool

    folder = tempfile.mkdtemp(prefix="lmdeploy-")
    try:
        path = Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        pool = TokenizerPool(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(pool, shutil.rmtree, folder, ignore_errors=True)
    return pool


def _vocabulary_only(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the steps that process text. The library runs normalizers even while loading."""
    removed = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))
    added = [{**token, "normalized": False} for token in settings.get("added_tokens") or ()]
    return {**settings, **removed, "added_tokens": added}


def _id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and 0 <= item < _MAX_IDS]


def _decoder_text(backend: Backend) -> str:
    """Return the settings of the decoder in Python's notation."""
    if backend.decoder is None:
        return ""
    # The state of the whole tokenizer has the vocabulary and would take a tenth of a second.
    return str(parse_json_object(backend.decoder.__getstate__(), "tokenizer: decoder"))


def _byte_table() -> dict[int, str]:
    """Return a table for str.translate that maps the byte alphabet to Latin-1.

    Other characters of Latin-1 map to a character outside it.
    """
    table = dict.fromkeys(range(256), "\uffff")
    table.update({ord(char): chr(byte) for char, byte in byte_alphabet().items()})
    return table


def _bytes_of_tokens(backend: Backend) -> tuple[list[bytes], bool]:
    """Return the bytes of every id, and whether decoding removes a first space."""
    decoder = _decoder_text(backend)
    if "ByteLevel" in decoder:
        byte_table = _byte_table()

        def convert(token: str) -> bytes:
            try:
                return token.translate(byte_table).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode("utf-8", "replace")

    elif "ByteFallback" in decoder or "Metaspace" in decoder or "'▁'" in decoder:

        def convert(token: str) -> bytes:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    pass
            return token.replace("▁", " ").encode("utf-8", "replace")

    else:
        raise ModelFormatError(
            f"tokenizer: The decoder is {decoder[:80]!r}. It must be one of byte-level BPE or of "
            "SentencePiece."
        )
    added = backend.get_added_tokens_decoder()
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    size = max([*vocab.values(), *added, 0]) + 1
    # Every id has a logit. A file with many more ids than tokens is broken.
    if size > 4 * (len(vocab) + len(added)) + 1024:
        raise ModelFormatError(
            f"tokenizer: The ids reach {size - 1}, but there are only {len(vocab)} tokens."
        )
    table = [b""] * size
    for token, token_id in vocab.items():
        table[token_id] = convert(token)
    for token_id, added_token in added.items():
        table[token_id] = added_token.content.encode("utf-8", "replace")
    strip = "'Strip'" in decoder or ("Metaspace" in decoder and "'never'" not in decoder)
    return table, strip

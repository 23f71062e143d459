"""④ Build the C++ request of a prompt and the objects that turn its tokens into an answer."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, NamedTuple

from lmdeploy.base.checks import ContextLengthError, OptionError, flag_of
from lmdeploy.chat.detokenize import TokenDetokenizer
from lmdeploy.chat.formats.text import TextDecoder
from lmdeploy.chat.grammar import Grammars, TokenMask, grammar_text, response_grammar
from lmdeploy.chat.stop_words import Answer, AnswerText, PlainAnswer, SpecialTokenStopFilter
from lmdeploy.config.option import copy_to_core

if TYPE_CHECKING:
    from lmdeploy._turbomind import Request
    from lmdeploy.chat.formats.base import AnswerDecoder, AnswerStart
    from lmdeploy.chat.tokenizer import Tokenizer
    from lmdeploy.config.generation import GenerationConfig
    from lmdeploy.engine.load import TextModel


class RequestParts(NamedTuple):
    """A C++ request and what its answer needs.

    `prompt_ids` are the caller's own list if nothing was added, so that n choices share it.
    """

    request: Request
    prompt_ids: list[int]
    answer: Answer
    decoder: AnswerDecoder


class RequestMaker:
    """Builds the requests of one call.

    Args:
        start: as in `AsyncEngine.submit`.
    """

    def __init__(
        self, model: TextModel, config: GenerationConfig, *, start: AnswerStart | None
    ) -> None:
        self._model = model
        self._config = config
        self._start = start
        self._constrained = is_constrained(config)
        # With tools, an answer is either calls or the content that response_format describes.
        has_tools = start is not None and start.tool_use is not None
        self._is_content_only = self._constrained and not has_tools

    def make(self, prompt_ids: list[int], *, grammars: Grammars, max_tokens: int) -> RequestParts:
        """Return the request of a prompt, without its id and its sampling options.

        `max_tokens` is the limit of a prompt plus its response. Raise OptionError if the request is
        wrong.
        """
        from lmdeploy import _turbomind

        model, config, start = self._model, self._config, self._start
        if start is not None and self._is_content_only:
            prefix = model.chat_format.constrained_prefix()
            prompt_ids = [*prompt_ids, *prefix] if prefix else prompt_ids
        num_new = min(config.max_new_tokens, 1)
        check_prompt(model, prompt_ids, num_new=num_new, max_tokens=max_tokens)
        check_token_ids(config, model.vocab_size)
        request = _turbomind.Request()
        request.prompt = prompt_ids
        request.max_new_tokens = min(config.max_new_tokens, max_tokens - len(prompt_ids))
        request.min_new_tokens = min(config.min_new_tokens or 0, request.max_new_tokens)
        request.eos_ids = [] if config.ignore_eos else list(model.eos_ids)
        template = model.chat_template
        of_template = template.stop_words if start is not None and template is not None else []
        stop_ids, plain_words, special_words = sort_stop_words(
            [*(config.stop_words or []), *of_template], model.tokenizer
        )
        request.stop_sequences = [[i] for i in [*(config.stop_token_ids or []), *stop_ids]]
        request.bad_sequences = bad_sequences(config, model.tokenizer)
        request.num_logprobs = -1 if config.logprobs is None else config.logprobs
        prompt_logprobs = config.prompt_logprobs
        request.num_prompt_logprobs = -1 if prompt_logprobs is None else prompt_logprobs
        request.logits_output = config.output_logits or "none"
        request.pooling = config.pooling or "none"
        longest = len(prompt_ids) + request.max_new_tokens
        request.long_rope = 0 < model.short_rope_length < longest
        request.cache_salt = salt_bytes(config.cache_salt, long_rope=request.long_rope)
        grammar = self._grammar()
        if grammar is not None:
            request.token_mask = self._token_mask(grammar, grammars)
        decoder = self._decoder()
        answer = self._answer_text(decoder, plain_words=plain_words, special_words=special_words)
        return RequestParts(request, prompt_ids, answer, decoder)

    def _token_mask(self, grammar: str, grammars: Grammars) -> TokenMask:
        """Return the callback of a grammar. Raise OptionError at the field that is wrong."""
        if self._is_content_only:
            return grammars.token_mask(grammar, field="response_format")
        response = grammar_text(self._config.response_format or {"type": "text"})
        if response is not None:
            grammars.token_mask(
                response, field="response_format"
            )  # checks the response apart from the tools
        return grammars.token_mask(grammar, field="tools")

    def _grammar(self) -> str | None:
        """Return the grammar of the answer, or None if it is free."""
        response_format = self._config.response_format
        if self._start is None:
            return None if response_format is None else grammar_text(response_format)
        response = None if response_format is None else response_grammar(response_format)
        return self._model.chat_format.grammar(self._start, response)

    def _decoder(self) -> AnswerDecoder:
        skip_special = self._config.skip_special_tokens
        if self._start is None:
            tokenizer = self._model.tokenizer
            return TextDecoder(TokenDetokenizer(tokenizer, skip_special, begins_text=False))
        return self._model.chat_format.decoder(
            self._start, skip_special=skip_special, constrained=self._is_content_only
        )

    def _answer_text(
        self, decoder: AnswerDecoder, *, plain_words: list[str], special_words: list[str]
    ) -> Answer:
        if not plain_words and not special_words and isinstance(decoder, TextDecoder):
            return PlainAnswer(decoder)
        config, start = self._config, self._start
        include_stop, min_tokens = config.include_stop_str_in_output, config.min_new_tokens or 0
        gate = None
        if special_words:
            begins_text = start is not None and not start.continue_final_message
            shown = TokenDetokenizer(
                self._model.tokenizer, skip_special=False, begins_text=begins_text
            )
            # The stop word that ends first wins, so the gate searches all words. If the decoder
            # splits the answer, the gate's text is not the content, so plain words are not its
            # task.
            words = special_words if decoder.splits else [*special_words, *plain_words]
            gate = AnswerText(shown, words, include_stop=include_stop, min_tokens=min_tokens)
        return SpecialTokenStopFilter(
            decoder, plain_words, gate=gate, include_stop=include_stop, min_tokens=min_tokens
        )


def check_prompt(
    model: TextModel,
    prompt_ids: list[int],
    *,
    num_new: int,
    max_tokens: int,
    name: str = "prompt",
) -> None:
    """Raise OptionError if the engine can never serve a prompt.

    Args:
        num_new: tokens that must fit after the prompt.
        max_tokens: the limit of a prompt plus its response.
        name: the field that the error names.
    """
    if not prompt_ids:
        raise OptionError(name, "is empty. It must have at least 1 token.")
    session_len = model.session_len
    wanted = len(prompt_ids) + num_new
    got = f"has {len(prompt_ids)} tokens"
    got += " and needs room for the answer, but" if num_new else ", but"
    if wanted > max_tokens:
        what, flag = f"session_len is {session_len} (the context length)", flag_of("session_len")
        if wanted <= session_len:
            what = f"the KV cache holds {max_tokens} tokens"
            flag = flag_of("cache_max_entry_count")
        raise ContextLengthError(
            name, f"{got} {what}. Shorten it or raise {flag}.", limit=max_tokens
        )
    top = max(prompt_ids)
    if top >= model.vocab_size or min(prompt_ids) < 0:
        bad = top if top >= model.vocab_size else min(prompt_ids)
        raise OptionError(
            name, f"contains token id {bad}. Ids must be 0 to {model.vocab_size - 1}."
        )


def check_token_ids(config: GenerationConfig, vocab_size: int) -> None:
    """Raise OptionError if an option contains a token id that the model does not have."""
    for name in ("stop_token_ids", "bad_token_ids", "logit_bias"):
        for token in getattr(config, name) or ():
            if token >= vocab_size:
                reason = f"contains token id {token}. Ids must be 0 to {vocab_size - 1}."
                raise OptionError(name, reason)


def sort_stop_words(
    words: list[str], tokenizer: Tokenizer
) -> tuple[list[int], list[str], list[str]]:
    """Sort stop words by the special tokens in them.

    Returns the ids of words that are one special token, the words without special tokens, and the
    words that contain special tokens among others.
    """
    special_ids, plain, special = [], [], []
    for word in words:
        ids = tokenizer.encode(word, add_special=False)
        if not any(map(tokenizer.is_special, ids)):
            plain.append(word)
        elif len(ids) == 1:
            special_ids += ids
        else:
            special.append(word)
    return special_ids, plain, special


def bad_sequences(config: GenerationConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token sequences that bad_words and bad_token_ids forbid.

    A word is forbidden both with and without a space before it.
    """
    sequences = [[i] for i in config.bad_token_ids or []]
    for word in config.bad_words or []:
        for spelling in (word, " " + word):
            ids = tokenizer.encode(spelling, add_special=False)
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences


def salt_bytes(salt: str | None, *, long_rope: bool = False) -> bytes:
    """Return the 16 bytes of a salt in the prefix cache. None becomes zeros.

    Keys with the long factors of longrope have salts of their own, which no text can have, because
    a text in UTF-8 has no byte FF.
    """
    short = bytes(16)
    if salt is not None:
        short = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()[:16]
    return hashlib.sha256(b"\xff" + short).digest()[:16] if long_rope else short


def is_constrained(config: GenerationConfig) -> bool:
    """Return whether response_format restricts the response by a grammar."""
    return config.response_format is not None and config.response_format.get("type") != "text"


def set_sampling(request: Request, config: GenerationConfig, *, index: int) -> None:
    """Set the sampling fields of `request`. `index` is that of `AsyncEngine.submit`."""
    request.do_sample = config.do_sample and config.temperature > 0
    request.temperature = config.temperature or 1.0
    copy_to_core(config, request)
    seed = secrets.randbits(64) if config.random_seed is None else config.random_seed
    request.seed = (seed + index) % 2**64
    request.logit_bias = list((config.logit_bias or {}).items())

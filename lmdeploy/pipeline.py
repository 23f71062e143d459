"""② Offline use: a pipeline turns prompts into responses.

The requests run in an event loop in a thread of its own. Therefore every method is an ordinary
blocking call, and any thread may call it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from lmdeploy.base.checks import ContextLengthError, check_instance, refuse, show
from lmdeploy.base.errors import EngineFailure
from lmdeploy.base.logs import set_log_level
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.generation import GenerationConfig
from lmdeploy.engine.prompt_jobs import Message, Prompt, PromptJob, prompt_jobs
from lmdeploy.engine.request import salt_bytes
from lmdeploy.kv_store.blocks import KvBlocks
from lmdeploy.response import Response, join_pieces

if TYPE_CHECKING:
    from types import TracebackType

    from lmdeploy.chat.tokenizer import Tokenizer
    from lmdeploy.config.chat_template import ChatTemplateConfig
    from lmdeploy.engine.async_engine import AsyncEngine
    from lmdeploy.engine.stream import RequestStream

_ANSWERED = ("stop", "length", "tool_calls")  # all finish reasons except error and abort


@dataclass
class Session:
    """A conversation of `Pipeline.chat`.

    Args:
        history: pairs of question and answer, the oldest first.
        response: the response of the last turn. None before the first turn.
    """

    history: list[tuple[str, str]] = field(default_factory=list)
    response: Response | None = None

    def messages(self, prompt: str) -> list[Message]:
        """Return the messages of the conversation with `prompt` as the next question."""
        result: list[Message] = []
        for question, answer in self.history:
            result.append({"role": "user", "content": question})
            result.append({"role": "assistant", "content": answer})
        return [*result, {"role": "user", "content": prompt}]


class Pipeline:
    """A loaded model. Close it after use, or use it as a context manager.

    Args:
        model_path: a Hugging Face folder, a GGUF file, a hub id, or `smollm2`.
        backend_config: options of the engine. None takes the defaults.
        chat_template_config: replaces the model's own template. None keeps it.
        log_level: DEBUG, INFO, WARNING, ERROR or CRITICAL.
        engine: an engine that is already loaded. The arguments above it are then ignored, except
            `log_level`. None loads the model.

    Raises:
        ValueError: if an option is wrong or the model cannot be loaded.
    """

    def __init__(
        self,
        model_path: str,
        backend_config: TurbomindEngineConfig | None = None,
        chat_template_config: ChatTemplateConfig | None = None,
        log_level: str = "WARNING",
        *,
        engine: AsyncEngine | None = None,
    ) -> None:
        # Imported here because `import lmdeploy` should not import asyncio.
        from lmdeploy.base.loop_thread import LoopThread
        from lmdeploy.engine.async_engine import AsyncEngine

        set_log_level(log_level)
        if backend_config is not None:
            check_instance("backend_config", backend_config, kind=TurbomindEngineConfig)
        if engine is None:
            engine = AsyncEngine.load(
                model_path, backend_config, chat_template_config=chat_template_config
            )
        self.engine = engine
        self._loop = LoopThread()
        self._closing = False  # new calls are rejected
        self._closed = False
        self._close_lock = threading.RLock()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and free the model. Further calls have no effect.

        Calls that wait in other threads raise EngineFailure.
        """
        if self.engine.in_other_process:
            return
        self._closing = True
        with self._close_lock:
            if not self._closed:
                self.engine.close()
                self._loop.close()
                self._closed = True

    def infer(
        self,
        prompts: Prompt | Sequence[Prompt],
        gen_config: GenerationConfig | list[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
        use_tqdm: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Response | list[Response]:
        """Return the response to one prompt, or a list of responses in the order of the prompts.

        Args:
            prompts: a string, a list of strings, a conversation (list of messages), or a list of
                conversations.
            gen_config: one for all prompts, or one per prompt. None takes the defaults. With n > 1
                the result is a list with n consecutive responses per prompt, also for one prompt.
            do_preprocess: apply the chat template.
            use_tqdm: show a progress bar.
            chat_template_kwargs: variables of the chat template. For GPT-OSS these are
                `reasoning_effort`, `tools` and `builtin_tools`, and they are checked.

        In a list of prompts, one that is longer than the context gets a response with the
        finish_reason `error` and the error_code `context_length_exceeded`.

        Raises:
            ValueError: if a prompt is wrong, or a single prompt is longer than the context. Then no
                prompt runs. Also if a gen_config does not fit the model (a token id or a grammar).
                That is found when its prompt starts, and the other prompts are cancelled.
            EngineFailure: if the engine has failed, was closed, or belongs to another process.
        """
        from tqdm import tqdm

        options = (chat_template_kwargs or {}) if do_preprocess else None
        self._check_open()
        jobs, single = prompt_jobs(
            self.engine, prompts, gen_config=gen_config, template_options=options
        )
        answers: list[Response | None] = [None] * len(jobs)
        with tqdm(total=len(jobs), disable=not use_tqdm, unit="prompt") as bar:

            async def run_one(slot: int, job: PromptJob) -> None:
                answers[slot] = await self._answer(job)
                bar.update(1)

            self._loop.run_all(jobs, run_one)
        result = cast("list[Response]", answers)
        return result[0] if single and len(result) == 1 else result

    __call__ = infer
    batch_infer = infer  # LMDeploy's older name

    def stream_infer(
        self,
        prompts: Prompt | Sequence[Prompt],
        gen_config: GenerationConfig | list[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Response]:
        """Yield the chunks of all responses as they arrive.

        The arguments and errors are those of `infer`. In a chunk, `index` is the number of its
        prompt and `choice` that of its response among the n. The last chunk of each response has a
        finish_reason. Closing the iterator early cancels the requests that still run.
        """
        options = (chat_template_kwargs or {}) if do_preprocess else None
        self._check_open()
        jobs, _ = prompt_jobs(self.engine, prompts, gen_config=gen_config, template_options=options)
        chunks: queue.Queue[Response | None] = queue.Queue()

        async def run_one(_: int, job: PromptJob) -> None:
            try:
                stream = await self._submit(job)
            except ContextLengthError as error:
                chunks.put(job.refused(error))
                return
            try:
                async for chunk in stream:
                    chunks.put(replace(chunk, index=job.index, choice=job.choice))
            finally:
                stream.close()

        future = self._loop.start_all(jobs, run_one)
        future.add_done_callback(lambda _: chunks.put(None))
        try:
            while (chunk := chunks.get()) is not None:
                yield chunk
                self.engine.check_process()
            self._loop.wait(future)
        finally:
            future.cancel()

    def chat(
        self,
        prompt: str,
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        stream_response: bool = False,
    ) -> Session | Iterator[Response]:
        """Add one turn to a conversation and return its session.

        The session then has the response in `response` and the turn in `history`. A turn that
        failed or was aborted is not added to the history.

        Args:
            prompt: the user's message.
            session: the conversation. None starts a new one.
            gen_config: its `n` must be 1. None takes the defaults.
            stream_response: return an iterator of chunks instead. The session is updated when the
                iterator ends.

        Raises:
            ValueError: if `n` is more than 1 or the conversation exceeds session_len.
            EngineFailure: as in `infer`.
        """
        if gen_config is not None and gen_config.n > 1:
            raise refuse(
                "n", gen_config.n, wanted="1 because a conversation continues with one answer"
            )
        session = session or self.session()
        chunks = self._chat_pieces(prompt, session, gen_config=gen_config)
        if stream_response:
            return chunks
        for _ in chunks:
            pass
        return session

    def session(self) -> Session:
        """Return a new conversation for `chat`."""
        return Session()

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, which has `encode(text)` and `decode(ids)`."""
        return self.engine.text.tokenizer

    def get_ppl(self, input_ids: list[int] | list[list[int]]) -> list[float]:
        """Return the mean negative log likelihood per token of each list, in nats.

        As in LMDeploy, this is the logarithm of the perplexity. The first token of a list is not
        scored, because no position predicts it.

        Args:
            input_ids: one list of token ids, or several. `tokenizer.encode` makes them from text.

        Raises:
            ValueError: if a list has fewer than 2 tokens.
            EngineFailure: if a request fails.
        """
        self._check_open()
        if isinstance(input_ids, str):
            raise refuse(
                "input_ids", input_ids, wanted="token ids, such as those of tokenizer.encode"
            )
        batch = cast(
            "list[list[int]]",
            [input_ids] if input_ids and isinstance(input_ids[0], int) else input_ids,
        )
        for i, ids in enumerate(batch):
            is_ids = isinstance(ids, list) and all(type(token) is int for token in ids)
            if not is_ids or len(ids) < 2:
                raise refuse("input_ids", ids, wanted="a list of at least 2 token ids")
            self.engine.check_prompt(ids, num_new=0, name=f"input_ids[{i}]")
        config = GenerationConfig(max_new_tokens=0, prompt_logprobs=0)
        jobs = [PromptJob(ids, config, index=i) for i, ids in enumerate(batch)]
        result = [0.0] * len(jobs)

        async def run_one(slot: int, job: PromptJob) -> None:
            response = await self._answer(job)
            if response.finish_reason not in _ANSWERED:
                why = response.error_message or f"It ended with {response.finish_reason}."
                raise EngineFailure(f"The request of input_ids[{slot}] failed: {why}")
            pairs = zip(response.prompt_logprobs or [], job.ids[1:], strict=True)
            values = [logprobs[token] for logprobs, token in pairs]
            result[slot] = -sum(values) / len(values)

        self._loop.run_all(jobs, run_one)
        return result

    def export_prefix(self, input_ids: list[int]) -> KvBlocks:
        """Return copies of the cached blocks of a prefix, for `import_prefix` of another process.

        Args:
            input_ids: token ids of a prompt that this pipeline has computed. Only whole blocks are
                copied, and only as far as they are still cached. With longrope, only those with
                the short factors are.

        Raises:
            ValueError: if `input_ids` is not a list of token ids.
            EngineFailure: if the engine has failed or was closed.
        """
        self._check_open()
        if not isinstance(input_ids, list) or not all(type(token) is int for token in input_ids):
            raise refuse("input_ids", input_ids, wanted="a list of token ids")
        self.engine.check_prompt(input_ids, num_new=0, name="input_ids")
        self.engine.check_healthy()
        running = self.engine.running
        blocks = running.core.export_prefix(input_ids, first=0, salt=salt_bytes(None))
        return KvBlocks(
            identity=running.cache_identity(),
            tokens=input_ids[: len(blocks) * running.block_tokens],
            block_tokens=running.block_tokens,
            blocks=blocks,
        )

    def import_prefix(self, blocks: KvBlocks) -> int:
        """Enter copies of blocks into the prefix cache. Return the number of tokens they hold.

        The number is smaller than that of the blocks if the cache has no room.

        Raises:
            ValueError: if the blocks are of another model, KV format or quality, or are damaged.
            EngineFailure: if the engine has failed or was closed.
        """
        self._check_open()
        self.engine.check_healthy()
        running = self.engine.running
        wanted = {**running.cache_identity(), "block_tokens": running.block_tokens}
        given = {**blocks.identity, "block_tokens": blocks.block_tokens}
        for name in sorted(wanted.keys() | given.keys()):
            if wanted.get(name) != given.get(name):
                raise ValueError(
                    f"blocks have {name} {show(given.get(name))}, but this engine has "
                    f"{show(wanted.get(name))}. Import them into an engine of the same model and "
                    "KV options."
                )
        if not blocks.blocks:
            return 0
        self.engine.check_prompt(blocks.tokens, num_new=0, name="blocks")
        count = running.core.import_prefix(
            blocks.tokens, first=0, blocks=blocks.blocks, salt=salt_bytes(None)
        )
        return count * running.block_tokens

    def _chat_pieces(
        self, prompt: str, session: Session, *, gen_config: GenerationConfig | None
    ) -> Iterator[Response]:
        chunks = []
        for chunk in self.stream_infer(session.messages(prompt), gen_config):
            chunks.append(chunk)
            yield chunk
        if chunks:
            session.response = join_pieces(chunks)
            if session.response.finish_reason in _ANSWERED:
                session.history.append((prompt, session.response.text))

    async def _submit(self, job: PromptJob) -> RequestStream:
        if job.error is not None:
            raise job.error
        return await self.engine.submit(
            job.ids,
            job.config,
            index=job.choice,
            start=job.start,
            grammars=job.grammars,
        )

    async def _answer(self, job: PromptJob) -> Response:
        try:
            stream = await self._submit(job)
        except ContextLengthError as error:
            return job.refused(error)
        return replace(await collect(stream), index=job.index, choice=job.choice)

    def _check_open(self) -> None:
        self.engine.check_process()
        if self._closing:
            raise ValueError("The pipeline is closed. Create a new one.")


async def collect(stream: RequestStream) -> Response:
    """Wait for all chunks and return the whole response. Cancellation cancels the request."""
    try:
        chunks = [chunk async for chunk in stream]
    finally:
        stream.close()
    if not chunks:
        raise RuntimeError("The stream ended without a chunk.")
    return join_pieces(chunks)

"""Run Hugging Face's server with a patched model. All requests share one ``PagedCache``.

The server keeps Hugging Face's routes, chat templates, streams and parsers. Every request has its
own sampling settings, and is cancelled when its client disconnects.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import itertools
import json
import logging
import math
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from tokenizers.decoders import DecodeStream
from transformers import AutoConfig, CompileConfig, ContinuousBatchingConfig
from transformers.cli.serve import Serve
from transformers.cli.serving import utils
from transformers.cli.serving.utils import CBGenerateManager, CBWorkerDeadError

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error, kind_of
from dsv4_ops.core.ints import INT64_MAX
from dsv4_ops.core.types import MAX_REQUESTS
from dsv4_ops.integrations.transformers.architectures import spec_of_config
from dsv4_ops.integrations.transformers.architectures.base import require_transformers
from dsv4_ops.integrations.transformers.batching.hooks import max_length
from dsv4_ops.integrations.transformers.batching.manager import NEUTRAL
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache, format_bytes
from dsv4_ops.integrations.transformers.generation.decoding import compiled_step
from dsv4_ops.integrations.transformers.loading.quantized import load_quantized
from dsv4_ops.integrations.transformers.patch import patch
from dsv4_ops.integrations.transformers.steps.compiled import check_backend
from dsv4_ops.integrations.transformers.steps.step import decode_step, prefill_step

OP = "serve"
_log = logging.getLogger(__name__)

LEAST_TEMPERATURE = 1e-4
"""Lowest temperature at which a request samples. At a lower temperature, logits divided by the
temperature might be infinite, so the request is greedy."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "suffix": ("",),
}
"""Unsupported fields of a request. We accept such a field only with one of these values, which
change nothing."""

_READ = {
    "model", "messages", "prompt", "input", "instructions", "stream", "seed",
    "temperature", "top_p", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "generation_config", "chat_template_kwargs", "tools",
}  # fmt: skip
"""Fields that have an effect if Hugging Face's handler reads them."""

_HARMLESS = {
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "stream_options", "user",
}  # fmt: skip
"""Fields that have no effect on an answer. Such a field may have any value."""

_TEXTS = {"text", "input_text", "output_text"}
"""Types of content parts that Hugging Face's handlers read for a text model. The handlers would
drop parts of other types silently."""

_CAUSED_BY_BODIES = (
    AttributeError, KeyError, RecursionError, TypeError, ValueError, TemplateError,
)  # fmt: skip
"""Errors that Hugging Face's handlers and chat templates raise for bad requests."""

_prompt_tokens: ContextVar[list[int] | None] = ContextVar("prompt_tokens", default=None)
"""The tokens of a prompt that a client sent as tokens. Hugging Face's handler takes only texts."""

_SECONDS_TO_END = 5
"""After a signal, the server waits this many seconds for running requests, then cancels them."""

_NO_ROUTES = ("/reset", "/load_model", "/v1/audio/transcriptions")
"""Routes of Hugging Face's server that we remove: the server runs one text model until it ends."""


class Server(Serve):  # type: ignore[misc]  # transformers is untyped
    """A server of OpenAI's API for one model.

    Args:
        path: Folder or name of the model and of the tokenizer.
        host: Address to listen at.
        port: Port to listen at; 0 selects a free port.
        quantized: Whether ``load_quantized`` loads the model; ``path`` must then be a folder.
        device: Device of the model; None selects a GPU if the machine has one.
        dtype: Dtype of the model; "auto" selects the dtype of the files.
        kv: See ``patch``.
        precision: See ``patch``.
        max_cache_len: Maximum tokens of a request, including its prompt.
        max_requests: Maximum requests of a step. The cache has ``max_requests`` rows, or
            ``max_batch_tokens`` rows if that is fewer.
        max_batch_tokens: Maximum tokens of a step.
        num_blocks: Blocks of the cache. None allocates enough blocks for all rows; on a GPU, it
            allocates fewer if the memory is too small.
        max_queue: Maximum requests that wait or run; the server refuses more.
        compile: Backend of ``torch.compile`` for the steps, or None.
        graphs: Whether CUDA graphs run the steps on a GPU.
        on_progress: Function that is called with a line of text about each phase of the start.

    Raises:
        ImportError: a package of the extra ``serve`` is missing.
        ValueError, TypeError, NotImplementedError: see ``patch`` and ``init_continuous_batching``;
            or the address is not free, the cache exceeds the memory, or ``quantized`` does not
            match the weights.

    Attributes:
        manager: Hugging Face's manager of all requests.
    """

    def __init__(
        self,
        path: str,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        quantized: bool = False,
        device: str | None = None,
        dtype: str = "auto",
        kv: str = "fp8",
        precision: str = "serve",
        max_cache_len: int = 8192,
        max_requests: int = 32,
        max_batch_tokens: int = 1024,
        num_blocks: int | None = None,
        max_queue: int = 256,
        compile: str | None = None,
        graphs: bool = True,
        on_progress: Callable[[str], None] = _log.info,
    ) -> None:
        checks = Checks(OP)
        checks.at_least(
            1, max_cache_len=max_cache_len, max_batch_tokens=max_batch_tokens, max_queue=max_queue
        )
        checks.at_least(1, most=MAX_REQUESTS, max_requests=max_requests)
        if num_blocks is not None:
            checks.at_least(1, num_blocks=num_blocks)
        checks.at_least(0, most=65535, port=port)
        checks.flag("quantized", quantized)
        checks.flag("graphs", graphs)
        if not isinstance(host, str):
            got = kind_of(host)
            raise checks.error("host", must="be a str", got=got, do="Pass 127.0.0.1, say")
        found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
        if dtype != "auto" and found not in (torch.bfloat16, torch.float16, torch.float32):
            must = "be auto, bfloat16, float16 or float32"
            raise checks.error("dtype", must=must, got=dtype, do="Leave it out")
        if not callable(on_progress):
            got = kind_of(on_progress)
            raise checks.error("on_progress", must="be a function", got=got, do="Pass print, say")
        if compile is not None:
            check_backend(OP, "compile", compile)
        self._thread: Any = None
        self.path, self.quantized, self._on_progress = path, quantized, on_progress
        self._patch: dict[str, Any] = {"kv": kv, "precision": precision}
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._place: dict[str, Any] = {"device_map": device, "dtype": dtype}
        super().__init__(
            continuous_batching=True, host=host, port=port, non_blocking=True, log_level="error"
        )
        # check now, because loading takes minutes
        read = AutoConfig.from_pretrained(path)
        spec = spec_of_config(OP, read, **self._patch)
        self._check_precision(checks, read, device)
        _check_address(checks, host, port)
        raised = "max_cache_len"
        if max_cache_len > read.max_position_embeddings:
            max_cache_len, raised = read.max_position_embeddings, ""
            on_progress(f"max_cache_len is {max_cache_len}, the model's max_position_embeddings")
        blocks = -(-max_cache_len // spec.block_tokens)
        most = max_requests * max_cache_len  # no step has more tokens
        max_batch_tokens = min(max_batch_tokens, most)
        rows, chunk = min(max_requests, max_batch_tokens), min(max_batch_tokens, max_cache_len)
        sizes = {"max_batch_size": rows, "max_cache_len": max_cache_len, "max_chunk": chunk}
        if num_blocks is not None or torch.device(device).type == "cpu":
            self._check_memory(checks, read, device, num_blocks or rows * blocks, sizes)
        models = self._model_manager
        # otherwise Hugging Face would load its own class at the next request for the model
        models.force_model, models.model_timeout = path, -1
        models._load_model = self._load
        models._load_processor = self._only_own(models._load_processor)
        listed = {"id": path, "object": "model", "created": 0, "owned_by": "dsv4_ops"}
        # before transformers 5.24, both methods raise if Hugging Face's hub has no cache folder
        models.list_models = models.get_gen_models = lambda: [listed]
        name = self._name_of_model()
        model, self._tokenizer = models.load_model_and_processor(name)
        config = ContinuousBatchingConfig(
            num_blocks=num_blocks,
            max_blocks_per_request=blocks,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_requests,
            per_request_processors=True,
            use_cuda_graph=None if graphs else False,
        )
        if compile is not None:
            config.varlen_compile_config = CompileConfig(backend=compile)
            for step in (prefill_step, decode_step):
                on_part = self._compiles(step.__name__)
                compiled_step(model, step, config.varlen_compile_config, on_part)
        self.manager = model.init_continuous_batching(_shared(model), config)
        if self.manager.most_tokens < max_cache_len:
            raised = "" if num_blocks is None else "num_blocks"
        self.manager.most_tokens = min(self.manager.most_tokens, max_cache_len)
        self.manager.start()
        state = self._generation_state
        state._cb_model_id, state._cb_manager = name, Batches(self.manager, max_queue, raised)
        on_progress(f"{self.manager.paged}")
        if compile is not None or self.manager.steps.captures:
            try:
                self._warm_up(max_batch_tokens)
            except BaseException:  # the manager's thread would keep the process alive
                self.manager.stop(hard_stop=True)
                raise
        self.manager.output_router.output_queue = Dropped()
        self.app = self.server.config.app
        self.server.config.timeout_graceful_shutdown = _SECONDS_TO_END
        self._harden(max_queue)

    def run(self) -> None:
        """Serve until a signal ends the server."""
        try:
            with suppress(KeyboardInterrupt):
                self.server.run()
        finally:
            self.manager.stop(hard_stop=True)

    def start(self) -> str:
        """Serve in a thread; return the address."""
        self._thread = threading.Thread(target=self.server.run, name="server", daemon=True)
        self._thread.start()
        while not self.server.started and self._thread.is_alive():
            time.sleep(0.01)
        host, port = self.server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    def stop(self) -> None:
        """Stop serving, and end all requests."""
        self.server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self.manager.stop(hard_stop=True)

    def start_server(self) -> None:
        """Do nothing: Hugging Face calls this method before the server has a model."""

    def _load(self, name: str, *_: Any, **__: Any) -> Any:
        """Load and patch the model in place of Hugging Face's ``_load_model``."""
        config = AutoConfig.from_pretrained(self.path)
        self._on_progress(f"loading {self.path}")
        if self.quantized:
            model = load_quantized(Path(self.path), **self._place)
        else:
            architecture = getattr(require_transformers(OP), config.architectures[0])
            model = architecture.from_pretrained(self.path, **self._place).eval()
        return patch(model, **self._patch)

    def _check_precision(self, checks: Checks, config: Any, device: Any) -> None:
        """Refuse ``quantized`` for plain weights, and require it for FP8 weights that only
        ``load_quantized`` can load."""
        stored = getattr(config, "quantization_config", None)
        if self.quantized and stored is None:
            raise checks.error(
                "quantized",
                must="be left out for plain weights",
                got=f"{self.path}, whose config has no quantization_config",
                do="Start the server without it",
            )
        # on a CPU, Hugging Face dequantises V4 and fails for V3, whose kv_a_proj ends in a block
        loads = torch.device(device).type == "cuda" or config.model_type == "deepseek_v4"
        if not self.quantized and not loads and (stored or {}).get("quant_method") == "fp8":
            raise checks.error(
                "quantized",
                must=f"be set for FP8 weights on {device}",
                got=False,
                do="Start the server with it",
            )

    def _check_memory(
        self, checks: Checks, config: Any, device: Any, num_blocks: int, sizes: dict[str, int]
    ) -> None:
        """Refuse a cache that alone, without the weights, exceeds the memory of the device."""
        settings: dict[str, Any] = {**sizes, **self._patch, "device": "meta"}
        one, two = (
            sum(PagedCache(config, num_blocks=n, **settings).memory().values()) for n in (1, 2)
        )
        needed = one + (num_blocks - 1) * (two - one)
        if torch.device(device).type == "cuda":
            memory = torch.cuda.mem_get_info(device)[0]
        else:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise checks.error(
                "num_blocks",
                must=f"leave memory on {device}, which has {format_bytes(memory)}",
                got=f"{num_blocks} blocks and {sizes['max_batch_size']} requests, which take "
                f"{format_bytes(needed)}",
                do="Pass a smaller max_cache_len, max_requests or num_blocks",
            )

    def _only_own(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Let ``load``, which loads the processor, refuse other models. ``_load`` runs after
        ``load``, and so gets no other model."""

        def checked(name: str, *args: Any, **rest: Any) -> Any:
            if name != self._name_of_model():
                raise argument_error(
                    OP, "model", must=f"be {self.path}", got=name, do="Start another server"
                )
            try:
                return load(name, *args, **rest)
            except (OSError, ValueError) as error:
                raise argument_error(
                    OP,
                    "MODEL",
                    must="have a tokenizer",
                    got=f"{self.path}, whose tokenizer does not load",
                    do="Save a tokenizer there by tokenizer.save_pretrained",
                ) from error

        return checked

    def _name_of_model(self) -> str:
        name: str = self._model_manager.process_model_name(self.path)
        return name

    def _is_own(self, name: Any) -> bool:
        """Whether ``name`` is the model's path, spelled in any way, or the name of the model's
        folder."""
        if not isinstance(name, str):
            return False
        path = Path(self.path)
        return path.resolve().name == name or (
            path.exists() and path.resolve() == Path(name).resolve()
        )

    def _checked(self, handler: Any, needed: str) -> Callable[..., Any]:
        """Return a function that calls Hugging Face's handler, but answers HTTP 400 if the handler
        cannot read a body, or would ignore a field."""
        handle, ignored = handler.handle_request, handler._unused_fields

        async def run(body: Any, request_id: str) -> Any:
            try:
                _check_types(body, needed)
                _check_fields(body, ignored, self._tokenizer)
                kinds = {part.get("type") for part in _parts(body)} - _TEXTS
                if kinds:
                    raise HTTPException(400, f"content must be text, got {min(map(str, kinds))}.")
                given = {name: value for name, value in body.items() if value is not None}
                own = {"model": self.path} if self._is_own(body.get("model")) else {}
                return await handle({"stream": False, **given, **own}, request_id)
            except (HTTPException, CBWorkerDeadError):
                raise
            except _CAUSED_BY_BODIES as error:
                _log.info("a request was refused", exc_info=True)
                raise HTTPException(
                    400,
                    "The body must be a request of OpenAI's API, got "
                    f"{type(error).__name__}: {error}.",
                ) from error

        return run

    def _compiles(self, step: str) -> Callable[[str], None]:
        return lambda part: self._on_progress(f"compiling {part} of {step}")

    def _warm_up(self, max_batch_tokens: int) -> None:
        """Compile the steps, and capture their CUDA graphs on a GPU."""
        if self.manager.steps.captures:
            with torch.no_grad():
                self.manager.steps.capture(max_batch_tokens, self._on_progress)
            return
        self.manager.add_request([0, 0], request_id="warm-up", max_new_tokens=2, eos_token_id=-1)
        result = self.manager.get_result()
        if result is None or result.error is not None:
            raise self.manager.background_thread_status.fatal_error or RuntimeError(result.error)

    def _harden(self, max_queue: int) -> None:
        """Answer bad requests with clear errors, cancel the requests of clients that disconnect,
        and remove ``_NO_ROUTES``."""
        for handler, needed in (
            (self._chat_handler, "messages"),
            (self._completion_handler, "prompt"),
            (self._response_handler, "input"),
        ):
            handler.handle_request = self._checked(handler, needed)
            handler._build_generation_config = _sampled(handler._build_generation_config)
        answer = self._completion_handler.handle_request
        self._completion_handler.handle_request = _for_each_prompt(answer, max_queue)
        self.app.add_middleware(Disconnects)

        for kind, answer in (
            (
                StarletteHTTPException,
                lambda error: (error.status_code, error.detail, error.headers),
            ),
            (RequestValidationError, lambda error: (422, error.errors()[0]["msg"], None)),
            (CBWorkerDeadError, lambda error: (503, str(error), None)),
            (RuntimeError, lambda error: (500, str(error), None)),
        ):
            self.app.add_exception_handler(kind, _handler(answer))
        routes = self.app.router.routes
        for route in [each for each in routes if getattr(each, "path", "") in _NO_ROUTES]:
            routes.remove(route)


class Batches(CBGenerateManager):  # type: ignore[misc]  # transformers is untyped
    """Hugging Face's link between the handlers of routes and the manager of requests.

    Args:
        manager: The manager, already started.
        max_queue: Maximum requests that wait or run.
        raised: The setting of ``Server`` that limits the length of prompts, or "".
    """

    def __init__(self, manager: Any, max_queue: int, raised: str) -> None:
        super().__init__()
        self._cb = Requests(manager)
        self.max_queue, self._count = max_queue, itertools.count()
        option = f"--{raised.replace('_', '-')}"
        self._remedy = f", or start the server with a larger {option}" if raised else ""

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Refuse settings that cannot differ between the requests of a batch."""
        for name, neutral in NEUTRAL.items():
            if getattr(gen_config, name, None) not in (None, neutral):
                raise HTTPException(400, f"{name} is not supported. Leave it out.")

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, **rest: Any
    ) -> Any:
        """Start a request whose tokens are streamed."""
        request_id = self._admit(inputs, gen_config, request_id)
        with _client_errors():
            texts, streamer = super().generate_streaming(
                model, processor, inputs, gen_config, request_id, **rest
            )
        _end_whole(streamer, getattr(processor, "tokenizer", processor))
        return texts, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """Run a request to its end; cancel it if its client disconnects."""
        request_id = self._admit(inputs, gen_config, request_id)
        try:
            with _client_errors():
                return await super().generate_non_streaming(
                    model, processor, inputs, gen_config, request_id
                )
        except asyncio.CancelledError:
            self._cb.cancel_request(request_id)
            raise

    def _admit(self, inputs: Any, gen_config: Any, request_id: str) -> str:
        """Check a request, and limit its new tokens; return an id that no other request has."""
        count = len(self._cb.unfinished())
        if count >= self.max_queue:
            raise HTTPException(
                503,
                f"The server has {count} requests, its most. Send the request again later.",
                headers={"Retry-After": "1"},
            )
        prompt = inputs["input_ids"]
        tokens = _prompt_tokens.get()
        if tokens is not None:
            prompt[:] = tokens
        if not len(prompt):
            raise HTTPException(400, "The prompt must have at least one token. Send a text.")
        most_new = self._cb.most_tokens - len(prompt) + 1  # the cache never stores the last token
        if most_new < 1:
            raise HTTPException(
                400,
                f"The prompt must have at most {self._cb.most_tokens} tokens, which the server's "
                f"cache stores, got {len(prompt)}. Send a shorter one{self._remedy}.",
            )
        wanted, longest = gen_config.max_new_tokens, max_length(gen_config)
        if longest is not None:
            if longest <= len(prompt):
                raise HTTPException(
                    400,
                    f"The prompt must have fewer tokens than max_length = {longest}, "
                    f"got {len(prompt)}. Pass max_tokens.",
                )
            wanted = longest - len(prompt)
        gen_config.max_new_tokens = most_new if wanted is None else int(min(wanted, most_new))
        request_id = f"{request_id}-{next(self._count)}"
        self._cb.sampling[request_id] = _sampling(gen_config, self._cb.model.config.vocab_size)
        return request_id


def _end_whole(streamer: Any, tokenizer: Any) -> None:
    """Let a stream send incomplete characters at its end, as an answer without a stream does.
    Hugging Face's streamer holds an incomplete character back until its missing bytes come."""
    tokens: list[int] = []
    put, end = streamer.put, streamer.end
    skips = {"skip_special_tokens": getattr(streamer, "_parser", None) is None}

    def noted(output: Any) -> None:
        tokens[:] = output.generated_tokens
        put(output)

    def whole() -> None:
        stream = DecodeStream([], **skips)
        sent = "".join(stream.step(tokenizer._tokenizer, token) or "" for token in tokens)
        rest = tokenizer.decode(tokens, **skips).removeprefix(sent)
        if rest and skips["skip_special_tokens"]:
            streamer._queue.put_nowait(rest)
        elif rest:
            for item in utils.response_events_to_chunks(streamer._parser.feed(rest)):
                streamer._queue.put_nowait(item)
        end()

    streamer.put, streamer.end = noted, whole


class Requests:
    """A manager that does not start a request before the request has a handler.

    Args:
        manager: Hugging Face's manager. ``Requests`` has all other attributes of the manager too.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.sampling: dict[str, dict[str, Any]] = {}
        self._pending: dict[str, Callable[[], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def add_request(self, input_ids: list[int], request_id: str, **rest: Any) -> str:
        """Add a request at once if it has a handler; otherwise wait for the handler."""
        arguments = {**rest, **self.sampling.pop(request_id, {})}

        def add() -> None:
            added = self._manager.add_request(input_ids, request_id=request_id, **arguments)
            error = self._manager.background_thread_status.fatal_error
            if added is None or error is not None:  # no thread would run the request
                state = error or "its end"
                raise CBWorkerDeadError(
                    f"The server must run to take requests, got {state}. Start it again."
                )

        if request_id in self.output_router.result_handlers:
            try:
                add()
            except Exception:
                self._forget(request_id)
                raise
        else:
            self._pending[request_id] = add
        return request_id

    def register_result_handler(self, request_id: str, callback: Any) -> None:
        """Register the handler of a request's outputs, and add the request if it waited for a
        handler."""
        self._manager.register_result_handler(request_id, callback)
        add = self._pending.pop(request_id, None)
        if add is not None:
            try:
                add()
            except Exception:
                self._forget(request_id)
                raise

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request, and forget its handler."""
        self._manager.cancel_request(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self.output_router.result_handlers.pop(request_id, None)


class Dropped(queue.Queue[Any]):
    """Queue for outputs that have no handler: the last outputs of cancelled requests."""

    def put(self, *_: Any, **__: Any) -> None:
        """Drop an output: nobody reads this queue."""


class Disconnects:
    """ASGI middleware that cancels a request when its client disconnects.

    Args:
        app: The application.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run a request until it ends or its client disconnects."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.ensure_future(receive())

        async def replay() -> Any:
            return messages.pop() if messages else await asyncio.shield(left)

        run = asyncio.ensure_future(self.app(scope, replay, send))
        try:
            try:
                await asyncio.wait({run, left}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:  # the server ends
                run.cancel()
                return
            if not run.done():
                run.cancel()
            await run
        except asyncio.CancelledError:
            if not left.done():
                raise
        finally:
            left.cancel()


def _check_address(checks: Checks, host: str, port: int) -> None:
    """Raise if the server could not listen at an address."""
    name, must, do = "host", "be an address of this machine", "Pass 127.0.0.1, or 0.0.0.0 for all"
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        got = f"{host!r}: {error}"
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            name, must, do = "port", "be free to listen at", "Pass another, or 0 for a free one"
            got = f"{port}: {error}"
        raise checks.error(name, must=must, got=got, do=do) from error


@contextmanager
def _client_errors() -> Iterator[None]:
    """Turn the errors of ``add_request`` into HTTP errors."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise HTTPException(400, str(error)) from error


def _check_types(body: dict[str, Any], needed: str) -> None:
    """Refuse values that no request of OpenAI's API has, and a body without the field
    ``needed``."""
    if body.get(needed) is None:
        raise HTTPException(400, f"{needed} must be {_TYPES[needed][0]}, got nothing.")
    _check_values(body, _TYPES, "")
    if body.get("generation_config") is not None:
        _check_values(json.loads(body["generation_config"]), _SETTINGS, "generation_config.")


def _check_values(fields: dict[str, Any], types: dict[str, _Type], owner: str) -> None:
    for name, (rule, holds) in types.items():
        value = fields.get(name)
        if value is not None and not holds(value):
            got = json.dumps(value)
            got = got if len(got) <= 60 else f"{got[:60]}..."
            raise HTTPException(400, f"{owner}{name} must be {rule}, got {got}.")


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _is_item(value: Any) -> bool:
    """Whether ``value`` may be a message, or another item of a conversation."""
    content = value.get("content") if isinstance(value, dict) else 0
    return (
        content is None
        or isinstance(content, str)
        or (
            isinstance(content, list)
            and all(
                isinstance(part, dict) and isinstance(part.get("type"), str) for part in content
            )
        )
    )


def _parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of all messages' contents. An ``input`` without roles is one content."""
    items = body.get("messages") or body.get("input") or ()
    if isinstance(items, str):
        return
    if items and "role" not in items[0]:
        items = [{"role": "user", "content": items}]
    for item in items:
        if "role" in item and isinstance(item.get("content"), list):
            yield from item["content"]


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(_is_item(each) and isinstance(each.get("role"), str) for each in value)
    )


def _is_json_object(value: Any) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False


def _is_type(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _is_int(least: int, most: float = math.inf) -> Callable[[Any], bool]:
    """Return a check for integers in a range. It accepts 5.0, which is an integer in JSON."""
    return lambda value: type(value) in (int, float) and least <= value <= most and value % 1 == 0


_Type = tuple[str, Callable[[Any], bool]]
_COUNT: _Type = ("an integer of at least 1", _is_int(1))
_NUMBER: _Type = ("a number", _is_number)
_STRING: _Type = ("a string", _is_type(str))

_TYPES: dict[str, _Type] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _COUNT),
    **dict.fromkeys(("temperature", "top_p"), _NUMBER),
    **dict.fromkeys(("model", "instructions", "suffix"), _STRING),
    "seed": ("an integer of 64 bits", _is_int(-INT64_MAX - 1, INT64_MAX)),
    "stream": ("true or false", _is_type(bool)),
    "chat_template_kwargs": (
        "an object without chat_template",  # a client's template might run for ever
        lambda value: isinstance(value, dict) and "chat_template" not in value,
    ),
    "generation_config": ("a string that holds a JSON object", _is_json_object),
    "messages": ("a list of messages, each with a role, and a text or parts", _are_messages),
    "prompt": ("a text, tokens, or a list of these", _is_type(str)),
    "input": (
        "a text, or a list of messages",
        lambda value: (
            isinstance(value, str)
            or (isinstance(value, list) and bool(value) and all(map(_is_item, value)))
        ),
    ),
    "tools": (
        "a list of objects",
        lambda value: isinstance(value, list) and all(map(_is_type(dict), value)),
    ),
}
"""Rule for each field of a request, in words and as a function."""

_SETTINGS: dict[str, _Type] = {
    **dict.fromkeys(("max_new_tokens", "max_length"), _COUNT),
    **dict.fromkeys(("temperature", "top_p"), _NUMBER),
    "top_k": ("an integer of at least 0", _is_int(0)),
    "do_sample": ("true or false", _is_type(bool)),
}
"""Rule for each setting that we read in a request's ``generation_config``."""


def _check_fields(body: Any, ignored: Collection[str], tokenizer: Any) -> None:
    """Refuse fields that would have no effect."""
    for name, value in body.items():
        if value is None or name in _HARMLESS or (name in _READ and name not in ignored):
            continue
        # compare types too, because 0 equals False
        if (type(value), value) not in [(type(each), each) for each in _NEUTRAL.get(name, ())]:
            raise HTTPException(400, f"{name} is not supported. Leave it out.")
    if body.get("tools") and not _reads_tools(tokenizer):
        raise HTTPException(
            400, "tools must be left out: the model's chat template has no place for them."
        )


def _reads_tools(tokenizer: Any) -> bool:
    """Whether the chat template puts tools into a prompt."""
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    messages = [{"role": "user", "content": "a"}]
    try:
        without, with_one = (
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
            for tools in (None, [{"type": "function", "function": function}])
        )
    except Exception:  # every request will raise the template's error
        return True
    return bool(without != with_one)


def _for_each_prompt(answer: Callable[..., Any], max_prompts: int) -> Callable[..., Any]:
    """Let ``/v1/completions`` take one or several prompts, as texts or as tokens, like OpenAI's
    API."""

    async def one(body: Any, request_id: str, prompt: Any) -> Any:
        if isinstance(prompt, list):
            _prompt_tokens.set(prompt)
            prompt = ""
        return await answer({**body, "prompt": prompt}, request_id)

    async def run(body: Any, request_id: str) -> Any:
        prompt = body.get("prompt")
        if not isinstance(prompt, list):
            return await answer(body, request_id)
        prompts = [prompt] if prompt and all(map(_is_token, prompt)) else prompt
        if not prompts or not all(map(_is_prompt, prompts)):
            raise HTTPException(400, f"prompt must be {_TYPES['prompt'][0]}. Send a text.")
        if len(prompts) > max_prompts:  # before tokenising, which would hold up other requests
            raise HTTPException(
                400,
                f"prompt must have at most max_queue = {max_prompts} prompts, got {len(prompts)}. "
                "Send several requests.",
            )
        if body.get("stream") and len(prompts) > 1:
            raise HTTPException(
                400, f"stream must be false for {len(prompts)} prompts. Ask for each alone."
            )
        runs = [
            asyncio.ensure_future(one(body, f"{request_id}-{index}", each))
            for index, each in enumerate(prompts)
        ]
        try:
            answers = await asyncio.gather(*runs)
        finally:
            for each in runs:
                each.cancel()
        return answers[0] if body.get("stream") else _merged(answers)

    return run


def _is_token(value: Any) -> bool:
    return type(value) is int


def _is_prompt(value: Any) -> bool:
    tokens = isinstance(value, list) and bool(value) and all(map(_is_token, value))
    return tokens or isinstance(value, str)


def _merged(answers: list[Any]) -> Any:
    """Merge answers into one answer that has the choices of all answers, in order."""
    bodies = [json.loads(each.body) for each in answers]
    choices = [each["choices"][0] | {"index": index} for index, each in enumerate(bodies)]
    usage = {
        name: sum(each["usage"][name] for each in bodies)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    return JSONResponse(bodies[0] | {"choices": choices, "usage": usage})


def _sampled(build: Callable[..., Any]) -> Callable[..., Any]:
    """Turn on sampling for a request with a temperature. Hugging Face reads the temperature only if
    the model's generation config turns on sampling."""

    def config_of(body: Any, *args: Any, **rest: Any) -> Any:
        config = build(body, *args, **rest)
        if body.get("temperature") is not None:
            config.do_sample = True  # ``_sampling`` makes temperatures near zero greedy
        return config

    return config_of


def _handler(answer: Callable[[Any], tuple[int, str, Any]]) -> Callable[..., Any]:
    """Return a handler that answers an error in the form of OpenAI's API."""

    async def handle(_: Any, error: Exception) -> Any:
        status, message, headers = answer(error)
        kind = "invalid_request_error" if status < 500 else "server_error"
        # a client's text may hold half of a surrogate pair, which UTF-8 cannot encode
        text = str(message).encode(errors="backslashreplace").decode()
        content = {"error": {"message": text, "type": kind, "code": status}}
        return JSONResponse(content, status, headers)

    return handle


def _shared(model: Any) -> Any:
    """Return a generation config that lets Hugging Face create logits processors whose values can
    differ between requests."""
    config = copy.deepcopy(model.generation_config)
    # Hugging Face creates no processor for a value that changes nothing, such as temperature 1
    config.do_sample, config.temperature, config.top_k, config.top_p = True, 0.5, 50, 0.5
    config.num_return_sequences = config.repetition_penalty = config.min_p = None
    return config


def _sampling(config: Any, vocab_size: int) -> dict[str, Any]:
    """Return the values of one request for the processors of ``_shared``."""
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    if not config.do_sample or 0 <= temperature < LEAST_TEMPERATURE:
        return {"temperature": 1.0, "top_k": 1, "top_p": 1.0}
    found = {
        "temperature": temperature,
        "top_k": min(int(config.top_k or vocab_size), vocab_size),
        "top_p": float(1.0 if config.top_p is None else config.top_p),
    }
    if (
        not 0 <= temperature < math.inf  # also false for NaN
        or found["top_k"] < 1
        or not 0 < found["top_p"] <= 1
    ):
        raise HTTPException(
            400,
            "temperature must be finite and not negative, top_k positive and top_p in (0, 1], "
            f"got {found}.",
        )
    return found

"""Serves a reward model over HTTP, in the forms of OpenRLHF (`/get_reward`) and vLLM (`/classify`, `/pooling`).

Requests and answers are JSON. Who is without the token learns only that the server is alive (`/health`).
"""

import asyncio
import hmac
import json
import logging
import math
import socket
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.base.text import count_noun
from lockstep.report.server_connections import QueueingServer, bounded_config
from lockstep.rewards.model_reward import cut_on_the_left
from lockstep.run.trained_models.local_reward_model import LocalRewardModel
from lockstep.run.trained_models.score_batching import QueueFull, ScoreBatcher

log = logging.getLogger(__name__)

JSON = dict[str, Any]

HEADER_BYTES = 16384
CLIENT_GONE = 499
"""The status of requests whose client left before the answer, in the metrics, as nginx counts them."""
SHUTDOWN_S = 10
"""How long requests in progress may take after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server accepts."""

    max_waiting: int = 2048
    """Texts that wait; a request that would add more gets 429."""
    max_body_bytes: int = 16 << 20
    body_s: float = 30.0
    """Time for the body of a request."""
    connections: int = 2048
    """Connections and requests at once; more get 503. OpenRLHF opens one for each completion."""
    reading: int = 256
    """Requests with the token whose texts are read and tokenized at once; more wait for `body_s`, then get 503."""
    batch_tokens: int = 16384
    """A batch gets no further request once it has this many tokens."""


class _Refused(Exception):
    """A request is not answered."""

    def __init__(self, status: int, problem: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(problem)
        self.status, self.problem, self.headers = status, problem, dict(headers or {})


@dataclass(frozen=True, slots=True)
class _TextOptions:
    """What a request says about its texts, in the words of vLLM."""

    special: bool
    """Whether the tokenizer adds its special tokens, such as that of the beginning."""
    longest: int
    """Tokens."""
    keep_end: bool
    """Whether a longer text is cut on the left."""
    activation: bool
    """Whether a sigmoid is applied."""

    @classmethod
    def of(cls, body: JSON, longest: int) -> "_TextOptions":
        """Raises _Refused. vLLM before 0.11.1 says `activation` for `use_activation`."""
        kept, side = body.get("truncate_prompt_tokens"), body.get("truncation_side")
        if kept is not None and (type(kept) is not int or kept < -1 or kept == 0):
            raise _Refused(400, "truncate_prompt_tokens: expected a number of tokens, or -1 for as many as possible")
        if side not in (None, "left", "right"):
            raise _Refused(400, "truncation_side: expected left or right")
        return cls(
            special=body.get("add_special_tokens") is not False,
            longest=longest if kept in (None, -1) else min(kept, longest),
            keep_end=side != "right",
            activation=body.get("use_activation", body.get("activation")) is not False,
        )


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """What is kept of a request while its texts wait."""

    tokens: list[np.ndarray]
    """int32 `[tokens]` of each text."""
    activation: bool

    @property
    def size(self) -> int:
        """Tokens of all texts."""
        return sum(each.size for each in self.tokens)


class RewardServer:
    """The application of a server; `app` is the ASGI callable.

    Args:
        name: the model's name in answers.
        token: what clients send as `Authorization: Bearer`; None for a server that anyone may use.
    """

    def __init__(self, model: LocalRewardModel, name: str, token: str | None, limits: ServerLimits) -> None:
        self._model, self._name, self._token, self.limits = model, name, token, limits
        self._batcher = ScoreBatcher(model.score, limits.max_waiting, limits.batch_tokens)
        self._statuses: Counter[tuple[str, int]] = Counter()
        self._truncated = 0
        self._reading = asyncio.Semaphore(limits.reading)
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_api_route("/health", self._health, methods=["GET"])
        self.app.add_api_route("/metrics", self._endpoint("/metrics", self._metrics), methods=["GET"])
        for path, answer in (
            ("/get_reward", self._get_reward), ("/classify", self._classify), ("/pooling", self._pooling)
        ):  # fmt: skip
            self.app.add_api_route(path, self._endpoint(path, answer), methods=["POST"])

    def _endpoint(
        self, path: str, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                self._check_token(request)
                response = await answer(request)
            except _Refused as refused:
                response = _json({"error": refused.problem}, refused.status, refused.headers)
            except ClientDisconnect:
                response = _json({}, CLIENT_GONE)
            except QueueFull as full:
                response = _json({"error": str(full)}, 429, {"retry-after": str(full.after_s)})
            except Exception as error:  # noqa: BLE001 - its text may quote the request, which is in no log
                log.error("%s failed: %s", path, type(error).__name__)
                response = _json({"error": f"the model failed: {type(error).__name__}"}, 500)
            self._statuses[path, response.status_code] += 1
            return response

        return handle

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise _Refused(401, "send the server's token as Authorization: Bearer", {"www-authenticate": "Bearer"})

    async def _health(self) -> Response:
        return _json({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        done = self._batcher.counters
        lines = [
            f'lockstep_reward_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._statuses.items())
        ]
        values = {
            "batches_total": done.batches, "texts_total": done.texts, "tokens_total": done.tokens,
            "compute_seconds_total": round(done.seconds, 6), "refused_total": done.refused,
            "truncated_total": self._truncated, "waiting_texts": self._batcher.waiting,
        }  # fmt: skip
        lines += [f"lockstep_reward_{name} {value}" for name, value in values.items()]
        return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def _get_reward(self, request: Request) -> Response:
        """OpenRLHF: `{"query": [text]}`. A text without the end-of-sequence token at its end gets it."""
        scores = await self._scores(request, await self._read(request, "query", self._ended))
        return _json({"rewards": scores, "scores": scores, "extra_logs": {}})

    async def _classify(self, request: Request) -> Response:
        """vLLM: `{"input": text or texts}` as they are. As there, a sigmoid is applied unless `use_activation` is
        false."""
        read = await self._read(request, "input")
        scores = await self._activated_scores(request, read)
        data = [
            {"index": index, "label": "LABEL_0", "probs": [score], "num_classes": 1}
            for index, score in enumerate(scores)
        ]
        return self._listed("classify", data, read.size)

    async def _pooling(self, request: Request) -> Response:
        """vLLM: the same in another form."""
        read = await self._read(request, "input")
        scores = await self._activated_scores(request, read)
        data = [{"index": index, "object": "pooling", "data": [score]} for index, score in enumerate(scores)]
        return self._listed("pool", data, read.size)

    def _listed(self, kind: str, data: list[JSON], tokens: int) -> Response:
        head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": self._name}
        return _json({**head, "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})

    async def _read(
        self, request: Request, field: str, prepare: Callable[[list[str]], list[str]] | None = None
    ) -> _ReadRequest:
        """Reads a request's texts, from this field, and tokenizes them; nothing else of the request stays in memory.
        `limits.reading` are read at once; others wait for their turn."""
        async with AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(self.limits.body_s):
                    await turn.enter_async_context(self._reading)
            except TimeoutError:
                reading = count_noun(self.limits.reading, "request")
                raise _Refused(503, f"{reading} are being read: try again", {"retry-after": "1"}) from None
            body = await self._body(request)
            if body.get("encoding_format", "float") != "float":
                raise _Refused(400, "encoding_format: only float is served")
            options = _TextOptions.of(body, self._model.longest)
            texts = self._texts(body.get(field), field)
            tokens = await asyncio.to_thread(self._encode, prepare(texts) if prepare else texts, options)
        return _ReadRequest(tokens, options.activation)

    async def _body(self, request: Request) -> JSON:
        """The JSON object of a request. Raises _Refused if it is too large, too slow or something else."""
        most = self.limits.max_body_bytes
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > most:
            raise _Refused(413, f"the body has {declared} bytes, and {most} is the limit: send fewer texts")
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.body_s):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise _Refused(413, f"the body has more than {most} bytes: send fewer texts")
        except TimeoutError:
            raise _Refused(408, f"the body did not arrive within {self.limits.body_s:g} s") from None
        try:
            body = parse_json(b"".join(parts), "the body")
        except MalformedJson:
            raise _Refused(400, "the body is not valid JSON") from None
        if not isinstance(body, dict):
            raise _Refused(400, "the body is not a JSON object")
        return body

    def _texts(self, value: object, field: str) -> list[str]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(each, str) and each for each in texts):
            raise _Refused(400, f"{field}: expected a list of texts that are not empty")
        if len(texts) > self.limits.max_waiting:
            most = count_noun(self.limits.max_waiting, "text")
            raise _Refused(413, f"{field} has {count_noun(len(texts), 'text')}: send {most} at most")
        for number, text in enumerate(texts):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise _Refused(400, f"{field}: text {number} is not Unicode: it has half of a surrogate pair") from None
        return texts

    def _ended(self, texts: list[str]) -> list[str]:
        """The texts, each with the end-of-sequence token at its end."""
        eos = str(self._model.tokenizer.eos_token)
        stripped = [text.rstrip() if text.rstrip().endswith(eos) else text for text in texts]
        return [text if text.endswith(eos) else f"{text}{eos}" for text in stripped]

    async def _activated_scores(self, request: Request, read: _ReadRequest) -> list[float]:
        scores = await self._scores(request, read)
        return [_sigmoid(score) for score in scores] if read.activation else scores

    async def _scores(self, request: Request, read: _ReadRequest) -> list[float]:
        """Returns the score of each text. What waits when its client leaves is not computed."""
        scoring = asyncio.create_task(self._batcher.scores(read.tokens))
        gone = asyncio.create_task(_disconnected(request))
        gone.add_done_callback(lambda _: scoring.cancel())
        try:
            scores = await scoring
        except asyncio.CancelledError:
            if not gone.done():  # the request itself is cancelled
                raise
            raise _Refused(CLIENT_GONE, "the client has closed the connection") from None
        finally:
            gone.cancel()
        if not np.isfinite(scores).all():
            number = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise _Refused(500, f"the score of text {number} is not finite")
        return [float(score) for score in scores]

    def _encode(self, texts: list[str], options: _TextOptions) -> list[np.ndarray]:
        """The tokens of each text; the beginning-of-sequence token is not doubled. Raises _Refused."""
        tokenizer, longest = self._model.tokenizer, options.longest
        bos, found = tokenizer.bos_token, []
        for number, text in enumerate(texts):
            begun = bos is not None and text.startswith(str(bos))
            tokens = np.asarray(
                tokenizer(text, add_special_tokens=options.special and not begun, verbose=False)["input_ids"], np.int32
            )
            if not tokens.size:
                raise _Refused(400, f"text {number} has no tokens")
            self._truncated += tokens.size > longest
            cut = cut_on_the_left(tokens, longest, tokenizer.bos_token_id) if options.keep_end else tokens[:longest]
            found.append(cut)
        return found


def http_server(server: RewardServer) -> uvicorn.Server:
    """The server of the application; `run(sockets=[...])` serves until Ctrl-C or SIGTERM, or until `should_exit` is
    set. The requests in progress get their answers."""
    return QueueingServer(bounded_config(server.app, server.limits.connections, HEADER_BYTES, SHUTDOWN_S))


def run_server(server: RewardServer, listening: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM; the requests in progress get their answers."""
    with suppress(KeyboardInterrupt):  # uvicorn raises it again when everything has ended
        http_server(server).run(sockets=[listening])


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))


def _json(content: JSON, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, dict(headers or {}), media_type="application/json")

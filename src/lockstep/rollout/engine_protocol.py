"""The interface of rollout engines: requests and completions, an engine in its process (`RolloutEngine`), and the calls
to its worker (`EngineAPI`). Also what all engines do with requests: seeds, validation, stop conditions.
"""

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from lockstep.cluster.protocol import concurrent
from lockstep.data.samples import Completion, FinishReason, PlacedImage
from lockstep.rollout.errors import BadRequest

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


class RequestSettings(msgspec.Struct, array_like=True, kw_only=True):
    """What all requests of a group have in common beside the prompt."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    """Lower values are admitted first, equal ones in the order of submission."""
    keep: bool = False
    """Whether to keep the keys and values of the sequence when it ends: a request may follow whose prompt begins with
    the sequence."""


class Request(RequestSettings, array_like=False):
    """A request for one completion."""

    id: str
    group: str
    """Requests of one group have the same prompt. It is prefilled once, and its keys and values are shared."""
    prompt: np.ndarray
    """int32 `[prompt tokens]`."""
    seed: int
    """The completion depends on this seed and on nothing else in the batch (up to floating point)."""
    images: tuple[PlacedImage, ...] = ()
    """The images of the prompt: the same for all requests of a group."""


@dataclass(slots=True)
class EngineProgress:
    """Counters of an engine."""

    tokens: int
    """Tokens generated since the engine started."""
    waiting: int
    running: int
    finished: int
    version: int
    paused: bool
    prefix_cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""


class RolloutEngine(Protocol):
    """An engine with continuous batching. Not thread-safe."""

    version: int
    """Version of the weights that the engine samples with."""
    slower: str
    """Why the engine does not decode in the fastest possible way; "" if it does."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues all requests or none. Raises BadRequest for the first that cannot be served."""

    def step(self) -> list[Completion]:
        """Admits waiting requests (prefill), decodes one token of every running request, and returns the completions
        that are finished. Returns at once if there is nothing to do or the engine is paused."""

    def abort(self, ids: Sequence[str] | None = None) -> list[Completion]:
        """Ends requests (all if None) and returns their partial completions, with `finish="abort"`."""

    def load_weights(self, source: Path, version: int) -> None:
        """Loads weights between two decode steps from the weight store at `source`.

        Running requests continue, and their later tokens carry the new version. Each engine documents whether it
        recomputes the KV cache of prompts."""

    def receive_weights(self, where: Mapping[str, Any], version: int) -> None:
        """Loads weights like `load_weights`, from a stream from the trainer's device, which `where` describes.

        Raises:
            WeightsMismatch: the tensors do not fit the model; nothing was changed.
            RuntimeError: the version did not arrive completely. The engine keeps its weights or, if it overwrites them
                bucket by bucket, serves no request until it has loaded a complete version."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def sleep(self, level: int = 1) -> None:
        """Releases device memory; the next call that needs the memory wakes the engine. At level 1 the engine keeps its
        weights (in host memory if they were on a GPU); at level 2 it may drop them, and new ones must be loaded. Raises
        ValueError if there are open requests."""

    def wake(self) -> None: ...

    def progress(self) -> EngineProgress: ...

    def close(self) -> None:
        """Ends the engine."""


ENGINE_SERVICE = "lockstep.rollout.engine_service:EngineService"


class RequestGroup(msgspec.Struct, array_like=True):
    """Requests of a group, which go to the same engine: what they have in common is made and sent once."""

    name: str
    prompt: bytes
    """int32 `[prompt tokens]`."""
    ids: list[str]
    seeds: list[int]
    settings: RequestSettings = msgspec.field(default_factory=RequestSettings)
    images: tuple[PlacedImage, ...] = ()

    @classmethod
    def all_of(cls, requests: Sequence[Request]) -> "list[RequestGroup]":
        """Groups of requests with the same name, prompt, images and settings, in the order of their first ones."""
        groups: dict[tuple[Any, ...], RequestGroup] = {}
        for request in requests:
            values = _settings(request)
            key = request.group, values, *prompt_key(request)
            group = groups.get(key)
            if group is None:
                prompt = np.asarray(request.prompt, np.int32).tobytes()
                settings = RequestSettings(**dict(zip(RequestSettings.__struct_fields__, values, strict=True)))
                group = groups[key] = cls(request.group, prompt, [], [], settings, request.images)
            group.ids.append(request.id)
            group.seeds.append(request.seed)
        return list(groups.values())

    @property
    def requests(self) -> list[Request]:
        """The requests one by one. They share a new array with the prompt."""
        prompt, settings = np.frombuffer(self.prompt, np.int32).copy(), msgspec.structs.asdict(self.settings)
        return [
            Request(id, self.name, prompt, seed, images=self.images, **settings)
            for id, seed in zip(self.ids, self.seeds, strict=True)
        ]

    def only(self, ids: Container[str]) -> "RequestGroup":
        """The group without all other requests."""
        kept = [number for number, id in enumerate(self.ids) if id in ids]
        return msgspec.structs.replace(
            self, ids=[self.ids[number] for number in kept], seeds=[self.seeds[number] for number in kept]
        )


_settings: Callable[[Request], tuple[Any, ...]] = attrgetter(*RequestSettings.__struct_fields__)


def prompt_key(request: Request) -> tuple[bytes, ...]:
    """Equal for requests with the same prompt and the same images."""
    images = (part for image in request.images for part in (image.digest.encode(), image.places.tobytes()))
    return request.prompt.tobytes(), *images


class CompletionBatch(msgspec.Struct, array_like=True):
    """Completions of an engine, oldest first. In columns, because a step has thousands."""

    requests: list[str]
    finishes: list[FinishReason]
    texts: list[str]
    sizes: list[int]
    """The number of tokens of each completion."""
    tokens: memoryview
    """Bytes: int32, one completion after the other."""
    logprobs: memoryview
    """Bytes: float32."""
    versions: list[int]
    """Versions of tokens that follow each other: a new one only where weights were loaded."""
    version_sizes: list[int]
    """How many tokens have each of them."""

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> "CompletionBatch":
        """Packs completions. Raises ValueError for one with tokens of an environment, which no engine generates."""
        if any(each.mask is not None or each.episode is not None or each.images for each in completions):
            raise ValueError("an engine's completions have no mask, no episode and no images")
        versions = np.concatenate([np.zeros(0, np.int32), *(each.versions for each in completions)])
        begins = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
        return cls(
            [each.request for each in completions],
            [each.finish for each in completions],
            [each.text for each in completions],
            [len(each.tokens) for each in completions],
            _joined([np.asarray(each.tokens, np.int32) for each in completions]),
            _joined([np.asarray(each.logprobs, np.float32) for each in completions]),
            versions[begins].tolist(),
            np.diff(begins, append=len(versions)).tolist(),
        )

    @property
    def completions(self) -> list[Completion]:
        """The completions, unpacked. Each call copies the arrays."""
        return self.unpack_all([self])[0]

    @staticmethod
    def unpack_all(batches: "Sequence[CompletionBatch]") -> "list[list[Completion]]":
        """The completions of each batch. Those of all batches share the memory of their arrays, a copy."""
        ends = list(accumulate(chain.from_iterable([batch.sizes for batch in batches])))
        parts = list(map(slice, chain((0,), ends), ends))
        versions = np.array(list(chain.from_iterable([batch.versions for batch in batches])), np.int32)
        columns = (
            np.frombuffer(bytearray().join([batch.tokens for batch in batches]), np.int32),
            np.frombuffer(bytearray().join([batch.logprobs for batch in batches]), np.float32),
            np.repeat(versions, list(chain.from_iterable([batch.version_sizes for batch in batches]))),
        )
        unpacked = map(
            Completion,
            chain.from_iterable([batch.requests for batch in batches]),
            *(map(column.__getitem__, parts) for column in columns),
            chain.from_iterable([batch.finishes for batch in batches]),
            chain.from_iterable([batch.texts for batch in batches]),
        )
        return [list(islice(unpacked, len(batch.sizes))) for batch in batches]


def _joined(arrays: Sequence[np.ndarray]) -> memoryview:
    return memoryview(b"".join([each.tobytes() for each in arrays]))


class EngineAPI(Protocol):
    """Calls to a `lockstep.rollout.engine_service:EngineService` worker."""

    def submit(self, groups: list[RequestGroup]) -> None:
        """Queues all requests or none. Raises BadRequest for the first that cannot be served."""

    def collect(self, hold_s: float = 0.0) -> CompletionBatch:
        """Returns the completions since the last call, each once: the connection sends a lost answer again.

        The call is answered when there are completions, or up to `hold_s` later while the engine has other requests
        that are as urgent; with none if another call follows. Raises the error that stopped the engine, if there is
        one.
        """

    def abort(self, ids: list[str] | None = None) -> None:
        """Ends requests (all if None); the next `collect` returns their partial completions, with `finish="abort"`."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def renew(self) -> None:
        """Drops all requests and completions; the model stays loaded."""

    def sleep(self, level: int = 1) -> None:
        """Releases device memory (see `RolloutEngine.sleep`). ValueError if there are open requests."""

    def wake(self) -> None: ...

    def load_weights(self, source: str, version: int) -> None:
        """Loads a version from the weight store, between two decode steps."""

    def receive_weights(self, where: dict[str, Any], version: int) -> None:
        """Loads a version as a stream from the trainer's device (see `RolloutEngine.receive_weights`)."""

    def slower(self) -> str:
        """Why the engine does not decode in the fastest possible way; "" if it does."""

    @concurrent
    def progress(self) -> EngineProgress:
        """The engine's counters; answered at any time."""


def check_request(request: Request, of_group: Request, open_ids: Container[str], context: int, vocabulary: int) -> None:
    """Raises BadRequest for a request that cannot be served.

    Args:
        of_group: a request of the same group, possibly this one.
        open_ids: ids of open requests.
        context: the largest length of a sequence.
        vocabulary: the number of tokens.
    """
    length = len(request.prompt)
    if request.id in open_ids:
        raise BadRequest(request.id, "is already open")
    if length == 0:
        raise BadRequest(request.id, "has an empty prompt")
    if request.max_tokens < 1:
        raise BadRequest(request.id, f"has max_tokens {request.max_tokens}, expected at least 1")
    if length + request.max_tokens > context:
        raise BadRequest(
            request.id,
            f"needs {length} prompt tokens + max_tokens {request.max_tokens} = {length + request.max_tokens}, "
            f"but the context has {context}",
        )
    if int(request.prompt.min()) < 0 or int(request.prompt.max()) >= vocabulary:
        raise BadRequest(request.id, f"has a prompt token outside of the vocabulary of {vocabulary}")
    if of_group.prompt is not request.prompt and not np.array_equal(of_group.prompt, request.prompt):
        raise BadRequest(request.id, f"has another prompt than the other requests of group {request.group!r}")
    if not same_images(of_group.images, request.images):
        raise BadRequest(request.id, f"has other images than the other requests of group {request.group!r}")
    if request.images and of_group is request:
        _check_images(request)


def same_images(one: Sequence[PlacedImage], other: Sequence[PlacedImage]) -> bool:
    """Whether two prompts have the same images at the same places."""
    return one is other or (
        len(one) == len(other)
        and all(
            a is b or (a.digest == b.digest and np.array_equal(a.places, b.places))
            for a, b in zip(one, other, strict=True)
        )
    )


def _check_images(request: Request) -> None:
    """Raises BadRequest unless the images' places are places of the prompt, in ascending order, before its last token,
    whose place has the first generated token as its successor."""
    length, before = len(request.prompt), -1
    for image in request.images:
        places = image.places
        if not len(places):
            raise BadRequest(request.id, f"has image {image.digest} without places in the prompt")
        if int(places[0]) <= before or not bool((np.diff(places) > 0).all()):
            problem = (
                f"has places of image {image.digest} that are not ascending, or not after those of the image before"
            )
            raise BadRequest(request.id, problem)
        before = int(places[-1])
        if before >= length:
            problem = f"has image {image.digest} at place {before}, but its prompt has {length} tokens"
            raise BadRequest(request.id, problem)
        if before == length - 1:
            problem = "has a prompt that ends with an image: at least one token of text must follow the last image"
            raise BadRequest(request.id, problem)


def empty_completion(request: Request) -> Completion:
    """The completion of a request that was aborted before it ran."""
    empty = np.zeros(0, np.int32)
    return Completion(request.id, empty, np.zeros(0, np.float32), empty.copy(), "abort", "")


def request_seed(run_seed: int, step: int, uid: str, k: int) -> int:
    """Returns the seed of the `k`-th completion of prompt `uid` at `step`: a stable hash, 0 <= seed < 2**63.

    The seed is the same on every machine and in every process and version of Python, so that a repeated generation
    gives the same completion.
    """
    return request_seeds(run_seed, step, uid, (k,))[0]


def request_seeds(run_seed: int, step: int, uid: str, numbers: Iterable[int]) -> list[int]:
    """`request_seed` of several completions of a prompt."""
    of_prompt = hashlib.blake2b(f"{run_seed}\0{step}\0{uid}\0".encode(), digest_size=8)
    seeds = []
    for k in numbers:
        of_completion = of_prompt.copy()
        of_completion.update(b"%d" % k)
        seeds.append(int.from_bytes(of_completion.digest(), "little") >> 1)
    return seeds


def stop_window(stop: Sequence[str]) -> int:
    """Returns how many of the last tokens to decode to find a stop string that has just been completed."""
    # A token stands for at least one byte. Special tokens stand for none; the extra tokens allow for some of them.
    return max(len(each.encode()) for each in stop) + 8


def contains_stop(
    tokenizer: "PreTrainedTokenizerBase", tails: Sequence[list[int]], stops: Sequence[Sequence[str]]
) -> list[bool]:
    """Whether each tail, the last `stop_window(stop)` tokens of a completion, contains one of its stop strings."""
    texts = tokenizer.batch_decode(list(tails))
    return [any(each in text for each in stop) for text, stop in zip(texts, stops, strict=True)]


def eos_tokens(tokenizer: "PreTrainedTokenizerBase", generation: "GenerationConfig | None") -> frozenset[int]:
    """Returns the tokens that end a sequence, from the tokenizer and from the model's generation config."""
    tokens: set[int] = set()
    for source in (tokenizer, generation):
        value: Any = getattr(source, "eos_token_id", None)
        if value is not None:
            tokens.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(int(token) for token in tokens)

"""The vLLM engine: admits requests, runs vLLM's steps, and returns completions."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lockstep.base.text import first_line
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import VllmEngineConfig as EngineConfig
from lockstep.data.images.image_store import ImageStore
from lockstep.data.samples import Completion, FinishReason
from lockstep.models.folder_digests import check_digests
from lockstep.models.hf_checkpoint import resolve_folder
from lockstep.models.model_loader import load_policy, load_tokenizer, usable_context
from lockstep.models.vision.vision_policy import is_vision_config
from lockstep.rollout.engine_protocol import (
    EngineProgress,
    Request,
    check_request,
    contains_stop,
    empty_completion,
    eos_tokens,
    stop_window,
)
from lockstep.rollout.errors import BadLogits, BadRequest, InterruptedUpdate, NoWeights, TornEngine
from lockstep.rollout.vllm.vllm_images import VllmImages
from lockstep.rollout.vllm.vllm_requests import (
    TrackedRequest,
    WaitingQueue,
    check_sampling,
    core_request,
    vllm_finish_reason,
)
from lockstep.rollout.vllm.vllm_setup import (
    check_usable,
    engine_arguments,
    image_settings,
    prepare_vllm,
    start_core,
    try_core,
    vllm_dtype,
    vllm_slowdown,
)
from lockstep.rollout.weight_loading import (
    CheckpointParameters,
    ReaderSource,
    WeightReceiver,
    open_receiver,
    watch_worker_progress,
)

_MEMORY = ("weights", "kv_cache")
"""The parts of memory that vLLM can release, by vLLM's names."""
_PROBE = Request("probe", "probe", np.zeros(1, np.int32), seed=0, max_tokens=1)


class VllmEngine:
    """Any causal language model that vLLM supports. Implements `RolloutEngine`.

    vLLM's engine core runs in this process and does one step per `step`, so that other calls come between its steps.
    With tensor parallelism its workers are child processes. At most `max_num_seqs` requests are in vLLM; the others
    wait in a queue of this class.

    New weights are loaded between two steps. Requests with tokens keep their keys and values, and their later tokens
    carry the new version. The recorded log-probabilities are those of the distribution that was sampled from. Requests
    without a token start again. The prefix cache never returns keys and values of older weights, because the number of
    weight loads so far is part of its keys.

    Args:
        core: an `InprocClient` of vLLM.
        tokenizer: decodes stop strings and the completions' text.
        eos: tokens that end a sequence.
        expected: the parameters that a version must have.
        vocabulary: the number of tokens.
        reader: reads versions for `load_weights`.
        version: version of the weights in the core.
        slower: why the engine does not decode in the fastest possible way; "" if it does.
        images: converts the images of requests; None if the engine gets none.
    """

    def __init__(
        self,
        core: Any,
        tokenizer: PreTrainedTokenizerBase,
        eos: frozenset[int],
        expected: CheckpointParameters,
        vocabulary: int,
        reader: ReaderSource | None = None,
        version: int = 0,
        slower: str = "",
        images: VllmImages | None = None,
    ) -> None:
        self.version, self.slower = version, slower
        self.tokenizer = tokenizer
        self.core = core
        config = core.engine_core.vllm_config
        self.context: int = config.model_config.max_model_len
        self._sleeps: bool = config.model_config.enable_sleep_mode
        self._workers: int = config.parallel_config.world_size
        self._capacity: int = config.scheduler_config.max_num_seqs
        self._eos, self._expected, self._vocabulary = eos, expected, vocabulary
        self._images = images
        self._has_reader = reader is not None
        if reader is not None:
            info = {"reader": reader, "expected": expected}
            self.core.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})
        self._waiting, self._running = WaitingQueue(), dict[str, TrackedRequest]()
        self._ids: set[str] = set()
        self._admitted, self._loads = 0, 0
        """Numbers of requests given to vLLM, and of weight loads."""
        self._torn: int | None = None
        """The version whose load left the weights in an unknown state; None if they are known."""
        self._receiver: WeightReceiver | None = None
        self._incomplete = False
        """Whether the weights are a mix of two versions, so that no request is served until a complete load."""
        self._asleep: frozenset[str] = frozenset()
        """The parts of memory that are released."""
        self._weights_dropped = False
        self._tokens, self._finished, self._paused = 0, 0, False
        self._cache_queries, self._cache_hits = 0, 0
        self._decoding = 0
        """Number of requests that vLLM decoded in the last step. Its KV cache has no room for the others."""

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        engine: EngineConfig,
        device: str = "cpu",
        reader: ReaderSource | None = None,
        version: int = 0,
        threads: int | None = None,
        sleeps: bool = False,
        images: str | None = None,
        most_images: int = 0,
    ) -> "VllmEngine":
        """Starts vLLM with the model.

        Args:
            images: folder of the run's prepared images; None if requests have no images.
            most_images: the most images of a prompt; 0 if it is not known.
            threads: number of threads of the whole engine on a CPU; vLLM's choice if None.
            sleeps: whether `sleep` can free the GPU's memory.

        Raises:
            VllmUnsupported: vLLM is not installed, or not supported.
            ModelError: the model cannot be found, or vLLM does not support it or cannot load it.
        """
        prepare_vllm(threads, engine.tensor_parallel_size, device)
        check_usable()
        check_digests(resolve_folder(model.path, model.revision))
        tokenizer = load_tokenizer(model)
        lm = load_policy(model, "cpu", meta=True).lm
        context = usable_context(model, lm.config)
        expected = None if images is None else image_settings(model, most_images, tokenizer)
        arguments = engine_arguments(model, engine, device, context, sleeps, lm.config, expected)
        core = start_core(model.path, arguments, lm.config.model_type if is_vision_config(lm.config) else "")
        vocabulary = int(lm.get_input_embeddings().weight.shape[0])
        eos = eos_tokens(tokenizer, _generation_config(model, lm.config))
        try_core(model.path, core, core_request("probe", _PROBE, eos, "probe"))
        why = vllm_slowdown(vllm_dtype(model, engine, device), device)
        changing = model.vision.tower.train or model.vision.projector.train
        takes = None if images is None else VllmImages.of_core(core, ImageStore(Path(images)), changing)
        return cls(core, tokenizer, eos, CheckpointParameters(lm), vocabulary, reader, version, why, takes)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues all requests or none. Raises BadRequest for the first that cannot be served."""
        first: dict[str, Request] = {}
        ids, checked = set(self._ids), set[tuple[float, ...]]()
        for request in requests:
            check_request(request, first.setdefault(request.group, request), ids, self.context, self._vocabulary)
            settings = (request.temperature, request.top_p, request.top_k, request.min_p)
            if settings not in checked:
                check_sampling(request, self._eos)
            checked.add(settings)
            if request.images:
                self._check_images(request)
            ids.add(request.id)
        self._ids = ids
        self._waiting.add(requests)

    def _check_images(self, request: Request) -> None:
        if self._images is None:
            raise BadRequest(request.id, "has images, but the engine was started without a folder of prepared images")
        self._images.check(request)

    def step(self) -> list[Completion]:
        """Admits requests, runs a step of vLLM, and returns the completions that are finished."""
        self._check_not_torn()
        if self._paused or self._incomplete or not (self._running or self._waiting):
            return []
        if self._weights_dropped:
            raise NoWeights
        self.wake()
        self._admit()
        return self._process_outputs(self.core.get_output())

    def abort(self, ids: Sequence[str] | None = None) -> list[Completion]:
        """Ends running or waiting requests (all if None). Unknown ids are those of finished requests."""
        wanted = None if ids is None else set(ids)
        chosen = {name: row for name, row in self._running.items() if wanted is None or row.request.id in wanted}
        self.core.abort_requests(list(chosen))
        partial = self._finish(chosen, dict.fromkeys(chosen, "abort"))
        waiting = self._waiting.remove(wanted)
        self._ids -= {request.id for request in waiting}
        return partial + [empty_completion(request) for request in waiting]

    def load_weights(self, source: Path, version: int) -> None:
        """Makes vLLM's workers load a version from the store at `source`.

        Raises:
            WeightsMismatch: the store's tensors do not fit the model; nothing was changed.
            TornEngine: the load of an earlier version failed halfway.
            ValueError: the engine has no reader.
        """
        if not self._has_reader:
            raise ValueError("the engine has no weight reader; pass `reader`")
        self._check_not_torn()
        self._update(version, {"folder": str(source), "version": version})

    def receive_weights(self, where: Mapping[str, Any], version: int) -> None:
        """Makes vLLM's workers receive a version from the trainer's device. Each bucket overwrites weights when it
        arrives. After an incomplete version, no request is served until a complete version is loaded.

        Raises:
            WeightsMismatch: the version's tensors do not fit the model; nothing was changed.
            InterruptedUpdate: the version did not arrive completely.
        """
        self._receiver = self._receiver or open_receiver(where)
        self._expected.check(self._receiver.promised(where))
        try:
            self._update(version, {"stream": dict(where), "version": version})
        except RuntimeError as error:
            raise InterruptedUpdate(version, first_line(error)) from error

    def _update(self, version: int, info: dict[str, Any]) -> None:
        """Makes the workers load a version.

        If that fails before a worker has changed its weights, the engine continues with the old version. An interrupted
        stream leaves complete layers of both versions: the engine then waits for a complete version. After any other
        failure the engine is torn: the state of its weights is unknown, and calls raise TornEngine.
        """
        self._wake("weights")
        torn, incomplete = self._torn, self._incomplete
        self._torn, self._incomplete = version, False
        with watch_worker_progress(self._workers) as progress_file:
            answers = self.core.collective_rpc("take_weights", kwargs={"info": info, "progress_file": progress_file})
        failed = sorted((each for each in answers if each.error is not None), key=lambda each: not each.touched)
        if failed:
            touched = any(each.touched for each in answers)
            self._torn = version if touched else torn
            self._incomplete = "stream" in info or (incomplete and not touched)
            if touched and not failed[0].touched:
                raise TornEngine(version) from failed[0].error
            raise failed[0].error
        self._torn, self._weights_dropped = None, False
        self.version = version
        self._loads += 1
        self._requeue_unstarted()
        if self._images is not None:
            self._images.forget(self.core)

    def _check_not_torn(self) -> None:
        if self._torn is not None and not self._incomplete:
            raise TornEngine(self._torn)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def sleep(self, level: int = 1) -> None:
        """Frees the GPU's memory, including the KV cache. At level 1 the weights go to host memory; at level 2 they are
        dropped, and steps raise NoWeights until a version is loaded. Calls that need memory wake the engine. On a CPU,
        or if the engine was not started with `sleeps`, nothing is freed.

        Raises:
            ValueError: there are open requests.
        """
        if self._ids:
            raise ValueError(f"the engine has {len(self._ids)} open requests: abort them before it sleeps")
        if self._sleeps and not self._asleep:
            level = 1 if self._expected.several_parts else level  # a version may lack parts that are not trained
            self.core.sleep(level)
            self._asleep = frozenset(_MEMORY)
            self._weights_dropped = self._weights_dropped or level > 1

    def wake(self) -> None:
        """Allocates released memory again."""
        self._wake(*_MEMORY)

    def _wake(self, *parts: str) -> None:
        """Allocates some of the released memory again. An update needs only the weights' part: the trainer may not have
        freed the memory for the KV cache yet."""
        for part in parts:
            if part in self._asleep:
                self.core.wake_up([part])
                self._asleep -= {part}

    def progress(self) -> EngineProgress:
        running = min(self._decoding, len(self._running))
        return EngineProgress(
            tokens=self._tokens,
            waiting=len(self._waiting) + len(self._running) - running,
            running=running,
            finished=self._finished,
            version=self.version,
            paused=self._paused or self._incomplete,
            prefix_cache_queries=self._cache_queries,
            prefix_cache_hits=self._cache_hits,
        )

    def close(self) -> None:
        """Ends vLLM and its workers."""
        self.core.shutdown()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._capacity and self._images_fit(self._waiting.first()):
            tracked = self._waiting.pop()
            name = str(self._admitted)
            self._admitted += 1
            self._running[name] = tracked
            images = None if self._images is None else self._images.features(tracked.request, self._loads)
            self.core.add_request(core_request(name, tracked.request, self._eos, str(self._loads), images))

    def _images_fit(self, request: Request) -> bool:
        unstarted = (row.request for row in self._running.values() if not row.tokens)
        return self._images is None or self._images.fit(unstarted, request)

    def _process_outputs(self, outputs: Any) -> list[Completion]:
        self._update_counters(outputs.scheduler_stats)
        ended: dict[str, FinishReason] = {}
        with_stop_strings: list[str] = []
        for output in outputs.outputs:
            tracked = self._running[output.request_id]
            if output.new_token_ids:
                self._append_tokens(tracked, output)
                if tracked.request.stop:
                    with_stop_strings.append(output.request_id)
            if output.finish_reason is not None:
                ended[output.request_id] = vllm_finish_reason(output)
        for name in self._find_stopped(with_stop_strings):
            if name not in ended:
                self.core.abort_requests([name])
            ended[name] = "stop"
        done = self._finish({name: self._running[name] for name in ended}, ended)
        self._finished += len(done)
        return done

    def _append_tokens(self, tracked: TrackedRequest, output: Any) -> None:
        logprobs = output.new_logprobs.logprobs[:, 0].tolist()
        for place, logprob in enumerate(logprobs):  # mostly one, for which an operation on an array would take longer
            if not isfinite(logprob):
                raise BadLogits(tracked.request.id, len(tracked.tokens) + place, logprob, self.version)
        tracked.append(output.new_token_ids, logprobs, self.version)
        self._tokens += len(output.new_token_ids)

    def _find_stopped(self, names: Sequence[str]) -> list[str]:
        """Returns the requests among these that have completed one of their stop strings."""
        if not names:
            return []
        rows = [self._running[name] for name in names]
        tails = [row.tokens[-stop_window(row.request.stop) :] for row in rows]
        hits = contains_stop(self.tokenizer, tails, [row.request.stop for row in rows])
        return [name for name, hit in zip(names, hits, strict=True) if hit]

    def _finish(self, rows: dict[str, TrackedRequest], reasons: dict[str, FinishReason]) -> list[Completion]:
        if not rows:
            return []
        texts = self.tokenizer.batch_decode([row.tokens for row in rows.values()], skip_special_tokens=True)
        for name, row in rows.items():
            del self._running[name]
            self._ids.discard(row.request.id)
        return [row.completion(reasons[name], text) for (name, row), text in zip(rows.items(), texts, strict=True)]

    def _requeue_unstarted(self) -> None:
        """Puts requests without a token back into the queue, because older weights prefilled their prompts."""
        unstarted = [name for name, row in self._running.items() if not row.tokens]
        self.core.abort_requests(unstarted)
        for name in unstarted:
            self._waiting.push(self._running.pop(name))

    def _update_counters(self, stats: Any) -> None:
        if stats is None:
            return
        self._decoding = stats.num_running_reqs
        prefix_cache = stats.prefix_cache_stats
        if prefix_cache is not None:
            self._cache_queries += prefix_cache.queries
            self._cache_hits += prefix_cache.hits


def _generation_config(model: ModelConfig, config: Any) -> GenerationConfig:
    """The model's generation config, which may have further end-of-sequence tokens."""
    try:
        return GenerationConfig.from_pretrained(resolve_folder(model.path, model.revision))
    except OSError:
        return GenerationConfig.from_model_config(config)

"""The builtin engine: admits requests, decodes one token of each per step, and returns completions."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lockstep.config.model import ModelConfig
from lockstep.config.rollout import BuiltinEngineConfig as EngineConfig
from lockstep.data.images.image_store import ImageStore
from lockstep.data.samples import Completion
from lockstep.models.model_loader import context_length, load_policy, load_tokenizer
from lockstep.models.vision.vision_policy import is_vision_config
from lockstep.rollout.builtin.prompt_images import ModelImages
from lockstep.rollout.builtin.runner_choice import choose_runner
from lockstep.rollout.builtin.sampler import SamplingRows, sample_tokens
from lockstep.rollout.builtin.scheduler import DecodeRows, Scheduler, StopChecker
from lockstep.rollout.engine_protocol import EngineProgress, Request, check_request, empty_completion, eos_tokens
from lockstep.rollout.errors import BadLogits, BadRequest
from lockstep.rollout.weight_loading import ExpectedParameters, WeightReader, WeightReceiver, open_receiver

log = logging.getLogger(__name__)


class BuiltinEngine:
    """Any causal language model of transformers, on the CPU or one GPU. Implements `RolloutEngine`.

    The vision tower of a vision-language model computes the features of a prompt's images when the prompt is prefilled,
    once per group, with the weights of that moment. Tokens that the model generates are text, whatever their ids.

    New weights are loaded between two decode steps. Running rows keep their keys and values, and their later tokens
    carry the new version. The recorded log-probabilities are those of the distribution that was sampled from. Prompts
    of later requests are prefilled with the new weights.

    Args:
        lm: an `AutoModelForCausalLM` or `AutoModelForImageTextToText`, on its device and in its precision.
        tokenizer: decodes stop strings and the completions' text.
        max_rows: the largest number of requests that are decoded together.
        cache_tokens: limit of the KV cache in tokens; it grows as needed if None.
        max_length: longest sequence; the model's own limit if None.
        reader: reads versions for `load_weights`.
        version: version of the weights in `lm`.
        prefix_cache: size of the cache of ended sequences (see `Request.keep`), as a share of `cache_tokens`.
        images: the prepared images of requests; their requests are refused if it is None.
    """

    def __init__(
        self,
        lm: Any,
        tokenizer: PreTrainedTokenizerBase,
        max_rows: int = 256,
        cache_tokens: int | None = None,
        max_length: int | None = None,
        reader: WeightReader | None = None,
        version: int = 0,
        prefix_cache: float = 0.5,
        images: ImageStore | None = None,
    ) -> None:
        self.version = version
        self.lm = lm.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device: torch.device = next(lm.parameters()).device
        self.context = max_length or context_length(lm.config)
        self._vocabulary = int(lm.get_input_embeddings().weight.shape[0])
        self._cache_tokens, self._reader = cache_tokens, reader
        self._rows = DecodeRows(max_rows)
        self._scheduler = Scheduler(cache_tokens)
        self._stops = StopChecker(tokenizer, eos_tokens(tokenizer, getattr(lm, "generation_config", None)))
        self._images = images
        source = ModelImages(lm, images) if images is not None and is_vision_config(lm.config) else None
        self._runner, self.slower = choose_runner(lm, self.device, self.context, cache_tokens, prefix_cache, source)
        self._expected = ExpectedParameters(lm)
        self._receiver: WeightReceiver | None = None
        self._sampling: SamplingRows | None = None
        self._ids: set[str] = set()
        self._tokens, self._finished, self._paused = 0, 0, False

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        engine: EngineConfig,
        device: str = "cpu",
        reader: WeightReader | None = None,
        version: int = 0,
        images: str | None = None,
    ) -> "BuiltinEngine":
        """Loads model and tokenizer. `images` is the folder of prepared images. Raises ModelError."""
        chosen = model.model_copy(update={"dtype": engine.dtype}) if engine.dtype != "auto" else model
        lm = load_policy(chosen, device).lm
        tokenizer = load_tokenizer(model)
        sizes = engine.max_rows, engine.cache_tokens, model.max_length
        store = None if images is None else ImageStore(Path(images))
        return cls(lm, tokenizer, *sizes, reader, version, engine.prefix_cache, store)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues all requests or none. Raises BadRequest for the first that cannot be served."""
        first: dict[str, Request] = {}
        ids = set(self._ids)
        for request in requests:
            check_request(request, first.setdefault(request.group, request), ids, self.context, self._vocabulary)
            self._check_fits_cache(request)
            if first[request.group] is request:
                self._check_images(request)
            ids.add(request.id)
        self._ids = ids
        self._scheduler.add(requests)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admits requests, decodes one token of every row, and returns the completions that are finished."""
        if self._paused:
            return []
        self._admit()
        if not len(self._rows):
            return []
        tokens, logprobs = self._sample(self._runner.decode(self._rows, self._scheduler.groups))
        self._rows.append_tokens(tokens, logprobs, self.version)
        self._tokens += len(tokens)
        return self._collect_finished()

    @torch.inference_mode()
    def abort(self, ids: Sequence[str] | None = None) -> list[Completion]:
        """Ends running or waiting requests (all if None). Unknown ids are those of finished requests."""
        wanted = None if ids is None else set(ids)
        rows = [row for row, each in enumerate(self._rows.requests) if wanted is None or each.id in wanted]
        partial = [self._rows.completion(row, "abort", self._text(row)) for row in rows]
        waiting = self._scheduler.remove_waiting(wanted)
        self._ids -= {request.id for request in waiting}
        self._free_rows(rows)
        return partial + [empty_completion(request) for request in waiting]

    @torch.inference_mode()
    def load_weights(self, source: Path, version: int) -> None:
        """Copies a version from the weight store at `source` into the model.

        Raises:
            WeightsMismatch: the store's tensors do not fit the model.
            ValueError: the engine has no reader.
        """
        if self._reader is None:
            raise ValueError("the engine has no weight reader; pass `reader`")
        self._runner.forget()
        with self._reader(source, version) as tensors:
            self._load(tensors)
        self.version = version
        self._remove_groups(())

    @torch.no_grad()
    def receive_weights(self, where: Mapping[str, Any], version: int) -> None:
        """Receives a version from the trainer's device, and copies it into the model when it is complete."""
        receiver = self._receiver = self._receiver or open_receiver(where)
        self._expected.check(receiver.promised(where))
        with receiver.stream(where, version, 0, self.device) as arriving:
            tensors = dict(arriving)
        self._runner.forget()
        self._load(tensors)
        self.version = version
        self._remove_groups(())

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def sleep(self, level: int = 1) -> None:
        """Frees the KV cache and the prefix cache, which grow again with the next requests. Keeps the weights at any
        level.

        Raises:
            ValueError: there are open requests.
        """
        if self._ids:
            raise ValueError(f"the engine has {len(self._ids)} open requests: abort them before it sleeps")
        self._runner.free()

    def wake(self) -> None:
        """Does nothing: the next request allocates the caches again."""

    def progress(self) -> EngineProgress:
        return EngineProgress(
            tokens=self._tokens,
            waiting=len(self._scheduler.waiting),
            running=len(self._rows),
            finished=self._finished,
            version=self.version,
            paused=self._paused,
            prefix_cache_queries=self._runner.prefixes.queries,
            prefix_cache_hits=self._runner.prefixes.hits,
        )

    def close(self) -> None:
        """Drops all requests and caches."""
        if self._receiver is not None:
            self._receiver.close()
        self.abort()
        self._runner.free()

    def _check_fits_cache(self, request: Request) -> None:
        needed = len(request.prompt) + request.max_tokens
        if self._cache_tokens is not None and needed > self._cache_tokens:
            raise BadRequest(request.id, f"needs {needed} tokens of KV cache, but the engine has {self._cache_tokens}")

    def _check_images(self, request: Request) -> None:
        if not request.images:
            return
        if not is_vision_config(self.lm.config):
            raise BadRequest(request.id, f"has images, but {type(self.lm).__name__} has no vision tower")
        if self._images is None:
            raise BadRequest(request.id, "has images, but the engine was started without the folder of prepared images")
        for image in request.images:
            if image.digest not in self._images:
                raise BadRequest(
                    request.id, f"has image {image.digest}, but {self._images.path(image.digest)} does not exist"
                )

    def _admit(self) -> None:
        new = self._scheduler.admit(self._rows, self.version)
        if new:
            self._runner.prefill(new, len(self._scheduler.groups) - len(new))
        if self._rows.changed:
            self._sampling = self._rows.sampling(self.device)

    def _sample(self, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        assert self._sampling is not None
        drawn, of = sample_tokens(logits, self._sampling, self._rows.counts[: len(self._rows)])
        tokens, logprobs = drawn.cpu().numpy(), of.cpu().numpy()
        bad = np.flatnonzero(~np.isfinite(logprobs))
        if len(bad):
            row = int(bad[0])
            raise BadLogits(
                self._rows.requests[row].id, int(self._rows.counts[row]), float(logits[row].amax()), self.version
            )
        return tokens, logprobs

    def _collect_finished(self) -> list[Completion]:
        """Removes the rows that ended with their last token, and returns their completions."""
        ended = self._stops.finished(self._rows)
        if not ended:
            return []
        rows = sorted(ended)
        texts = self._texts(rows)
        done = [self._rows.completion(row, ended[row], text) for row, text in zip(rows, texts, strict=True)]
        self._runner.keep(self._rows, self._scheduler.groups, [row for row in rows if self._should_keep(row)])
        self._free_rows(rows)
        self._finished += len(done)
        return done

    def _should_keep(self, row: int) -> bool:
        """Whether to keep a row's keys and values: its request asks for it, and all come from the current weights."""
        prompt = self._scheduler.groups[self._rows.group_slot[row]]
        versions = self._rows.versions[row, : self._rows.counts[row]]
        return (
            self._rows.requests[row].keep and prompt.version == self.version and bool((versions == self.version).all())
        )

    def _free_rows(self, rows: list[int]) -> None:
        """Removes the rows, and the groups without rows."""
        groups = self._rows.group_slot[rows].tolist()
        self._ids -= {self._rows.requests[row].id for row in rows}
        if rows:
            self._runner.move_rows(*self._rows.remove(rows))
        self._remove_groups(groups)

    def _remove_groups(self, ended: Sequence[int]) -> None:
        """Removes groups that are no longer needed. `ended` has the group's slot of each row that has ended."""
        sources, targets = self._scheduler.remove_groups(ended, self._rows, self.version)
        self._runner.move_groups(sources, targets)

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        self._expected.check(tensors)
        parameters = dict(self.lm.named_parameters(remove_duplicate=False))
        for name, tensor in tensors.items():
            _copy_parameter(parameters[name], tensor)

    def _text(self, row: int) -> str:
        return self._texts([row])[0]

    def _texts(self, rows: list[int]) -> list[str]:
        tokens = [self._rows.tokens[row, : self._rows.counts[row]].tolist() for row in rows]
        texts: list[str] = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts


def _copy_parameter(parameter: Tensor, tensor: Tensor) -> None:
    """Copies a parameter. If the engine stores it transposed, copying in two steps takes half the time."""
    transposed = parameter.ndim == 2 and parameter.stride(0) == 1 < parameter.stride(1)
    if transposed and tensor.device.type == parameter.device.type == "cpu":
        parameter.t().copy_(tensor.t().contiguous())
    else:
        parameter.copy_(tensor)

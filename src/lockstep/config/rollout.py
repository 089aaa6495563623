"""How completions are generated: sampling, engines, and environments or tools for conversations."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.model import DType
from lockstep.config.section import Section, default_kind


class EnvironmentConfig(Section):
    """A conversation instead of one completion: after each turn of the model, the environment (or the tools that the
    turn calls) replies, until it ends the conversation. `rollout.sampling.max_tokens` limits the whole conversation,
    replies included."""

    path: str | None = None
    """The environment: `file.py:Class` or `package.module:Class`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""
    tools: tuple[str, ...] = ()
    """Instead of a class: functions that the model may call, `file.py:function` or `package.module:function`."""
    parser: Literal["hermes", "regex"] = "hermes"
    """The form of tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), or
    `pattern`."""
    pattern: str | None = None
    """For the parser `regex`: matches a call; its group `arguments` is the only argument of the tool (or a JSON object
    of several), its group `name` the tool if there are several."""
    result: str = "{content}"
    """For the parser `regex`: format string for the result of a tool."""
    max_turns: int = Field(8, gt=0)
    """Largest number of the model's turns; a conversation that needs more counts as truncated."""
    max_turn_tokens: int | None = Field(None, gt=0)
    """Longest turn of the model (a longer one ends the conversation, truncated); the rest of the whole when absent."""
    branches: tuple[int, ...] = ()
    """The number of continuations into which a conversation splits after the reply to its first turn, its second, and
    so on: `[4]` with a group size of eight makes two first turns and four continuations of each. The product divides
    the group size."""
    workers: int = Field(1, gt=0)
    """Number of processes that run environments and tools."""
    max_images: int = Field(0, ge=0)
    """The most images with which the environment answers in one conversation, for models that read images; 0 if it
    answers with text only."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one reply; then the process is replaced."""
    memory_mb: int | None = Field(None, gt=0)
    """Address space limit per process."""
    on_error: Literal["tell", "end", "stop"] = "tell"
    """When an environment or tool fails or hangs: give the error to the model as the reply (`tell`), `end` the sample,
    or `stop` the run."""

    @model_validator(mode="after")
    def _check_environment(self) -> Self:
        if (self.path is None) == (not self.tools):
            raise ValueError("set either path (an environment's class) or tools (functions)")
        if self.tools and self.arguments:
            raise ValueError("arguments belong to an environment's class: tools get theirs from the model")
        if (self.parser == "regex") != (self.pattern is not None):
            raise ValueError("the parser regex and a pattern belong together: set both or neither")
        if self.path is not None and self.parser == "regex":
            raise ValueError("parser and pattern are for tools: an environment's class parses the model's turns itself")
        if any(count < 1 for count in self.branches):
            raise ValueError(f"branches {list(self.branches)} must all be at least 1")
        if self.pattern is not None:
            _check_pattern(self.pattern, len(self.tools))
        if "{content}" not in self.result:
            raise ValueError(f"result {self.result!r} does not contain {{content}}")
        return self


def _check_pattern(pattern: str, tools: int) -> None:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    if "arguments" not in groups:
        raise ValueError(f"pattern {pattern!r} has no group (?P<arguments>...)")
    if tools > 1 and "name" not in groups:
        raise ValueError(f"pattern {pattern!r} has no group (?P<name>...), which distinguishes the {tools} tools")


class SamplingConfig(Section):
    """Sampling parameters, named as in vLLM and transformers. GRPO with `top_p`, `top_k` or `min_p` needs
    `loss.old_logprobs: trainer`: the engine's log-probabilities are normalised over the tokens that sampling keeps."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 disables it."""
    min_p: float = Field(0.0, ge=0, lt=1)
    max_tokens: int = Field(256, gt=0)
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they are part of it, since the model must learn to write them."""
    ignore_eos: bool = False


class BuiltinEngineConfig(Section):
    """Lockstep's own engine: plain torch, CPU or one GPU. On a CPU it is faster than vLLM for small models."""

    kind: Literal["builtin"] = "builtin"
    count: int = Field(1, gt=0)
    """Number of engine processes."""
    dtype: DType = "auto"
    max_rows: int = Field(256, gt=0)
    """Largest number of rows that are decoded together."""
    cache_tokens: int | None = Field(None, gt=0)
    """Size of the preallocated KV cache in tokens; enough for `max_rows` when absent."""
    prefix_cache: float = Field(0.5, ge=0, le=1)
    """Share of the KV cache (of `cache_tokens`; when absent, of the size for `max_rows` conversations) that is used
    in addition to keep conversations for their next turn. The least recently used are evicted first, and all when new
    weights arrive. 0 disables it."""
    threads: int | None = Field(None, gt=0)
    """Torch threads per engine; an even share of the cores when absent."""
    malloc: Literal["tuned", "default"] = "tuned"
    """As in `trainer.malloc`; logits of a large vocabulary are written about twice as fast."""


class VllmEngineConfig(Section):
    """vLLM (extra `vllm`), on CPUs or GPUs. Fields are named as vLLM's arguments."""

    kind: Literal["vllm"] = "vllm"
    count: int = Field(1, gt=0)
    """Number of engines."""
    tensor_parallel_size: int = Field(1, gt=0)
    """GPUs (or processes) per engine."""
    dtype: DType = "auto"
    max_num_seqs: int = Field(256, gt=0)
    """Largest number of sequences that are decoded together."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory for weights and KV cache; lower if the trainer uses the same GPU."""
    cpu_kv_cache_gb: float = Field(1.0, gt=0)
    """GiB of KV cache on a CPU."""
    enforce_eager: bool | None = None
    """Disable CUDA graphs and compilation; true on a CPU when absent, else vLLM's default."""
    enable_prefix_caching: bool = True
    """Compute the prompt of a group once; the cache is cleared with new weights."""
    threads: int | None = Field(None, gt=0)
    """Torch threads of the engine on a CPU; an even share of the cores when absent."""
    extra: dict[str, Any] = {}
    """Further arguments of vLLM's `EngineArgs`, passed unchanged."""

    @model_validator(mode="after")
    def _check_extra(self) -> Self:
        for name, value in self.extra.items():
            field = _MODEL_FIELDS.get(name) or (f"rollout.engine.{name}" if name in type(self).model_fields else "")
            if field:
                raise ValueError(f"extra has {name}, which is a field of its own: set {field}")
            if name in _SET_BY_LOCKSTEP:
                raise ValueError(f"extra has {name}, which Lockstep sets: {_SET_BY_LOCKSTEP[name]}; leave it out")
            if name in _FIXED_VALUES and value not in (None, _FIXED_VALUES[name]):
                raise ValueError(
                    f"extra has {name} {value!r}: with several batches in flight, or several engines in one, it is "
                    "unknown which weights made a token; leave it out (rollout.engine.count sets the number of engines)"
                )
        limits = self.extra.get("limit_mm_per_prompt", {})
        if not isinstance(limits, dict) or not all(isinstance(_count(each), int) for each in limits.values()):
            raise ValueError(
                f"extra has limit_mm_per_prompt {limits!r}: give a number for each modality, such as {{image: 2}}"
            )
        return self

    @property
    def image_limit(self) -> int | None:
        """The most images of a prompt that vLLM is to expect, by `extra.limit_mm_per_prompt`; None if it says none."""
        limit: int | None = _count(self.extra.get("limit_mm_per_prompt", {}).get("image"))
        return limit


_MODEL_FIELDS = {
    "model": "model.path", "revision": "model.revision", "max_model_len": "model.max_length",
    "trust_remote_code": "model.trust_remote_code",
}  # fmt: skip
_SET_BY_LOCKSTEP = {
    "logprobs_mode": "training needs the log-probabilities that were sampled from",
    "skip_tokenizer_init": "the engine has its own tokenizer",
    "weight_transfer_config": "weights come from the trainer",
    "worker_extension_cls": "weights come from the trainer",
    "enable_sleep_mode": "it follows placement.colocate",
    "mm_processor_kwargs": "images are prepared as model.vision says",
}
_FIXED_VALUES = {"async_scheduling": False, "pipeline_parallel_size": 1, "data_parallel_size": 1}
"""The only allowed values."""


def _count(limit: Any) -> Any:
    """The number in a value of vLLM's `limit_mm_per_prompt`, which may also have the size of the largest image."""
    return limit.get("count", 999) if isinstance(limit, dict) else limit


VLLM_MAX_TEMPERATURE = 2.0
"""vLLM's highest temperature."""


EngineConfig = Annotated[BuiltinEngineConfig | VllmEngineConfig, Field(discriminator="kind"), default_kind("builtin")]


class ReissueConfig(Section):
    """With two or more engines: when a step waits only for engines that are far behind the others, their open
    completions are also generated by other engines, with the same seeds. The first result counts."""

    enable: bool = True
    slower_than: float = Field(0.25, gt=0, lt=1)
    """An engine is far behind when it makes less than this share of the tokens per second and sequence of the other
    engines (their median) at a similar number of sequences. Neither long completions nor many make an engine slow."""
    after_s: float = Field(30.0, gt=0)
    """... for this many seconds, or when it makes no token at all for as long."""


class RolloutConfig(Section):
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = BuiltinEngineConfig()
    max_staleness: int = Field(0, ge=0)
    """How many steps older than the trained weights the generating weights may be. With 0, generation and training
    alternate; with k, engines generate the next k steps while a step is trained."""
    reissue: ReissueConfig = ReissueConfig()
    environment: EnvironmentConfig | None = None
    """Conversations with an environment or tools; plain completions when absent."""

    def check(self, sampling: SamplingConfig, field: str) -> None:
        """Raises ValueError for sampling parameters that the engine refuses."""
        if self.engine.kind == "vllm" and sampling.temperature > VLLM_MAX_TEMPERATURE:
            raise ValueError(
                f"vLLM refuses {field}.temperature {sampling.temperature:g}: set it to at most "
                f"{VLLM_MAX_TEMPERATURE:g}, or rollout.engine.kind=builtin"
            )

"""How completions are generated: sampling, engines, and environments or tools for conversations."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.model import DType
from lockstep.config.section import Section, default_kind


class EnvironmentConfig(Section):
    """A conversation instead of one completion: after each of the model's turns the environment (or the tools that
    the turn calls) answers, until it is done. `rollout.sampling.max_tokens` bounds the conversation as a whole,
    answers included."""

    path: str | None = None
    """The environment: `file.py:Class` or `package.module:Class`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class."""
    tools: tuple[str, ...] = ()
    """Instead of a class: functions that the model may call, `file.py:function` or `package.module:function`."""
    parser: Literal["hermes", "regex"] = "hermes"
    """How calls are written: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), or as
    `pattern` says."""
    pattern: str | None = None
    """Of the parser `regex`: finds a call; its group `arguments` is the one argument of the tool (or a JSON object of
    several), its group `name` the tool where there are several."""
    result: str = "{content}"
    """Of the parser `regex`: format string around what a tool returned."""
    max_turns: int = Field(8, gt=0)
    """Turns of the model; a conversation that wants more counts as truncated."""
    max_turn_tokens: int | None = Field(None, gt=0)
    """Longest turn of the model (a longer one ends the conversation, truncated); what is left of the whole when
    absent."""
    branches: tuple[int, ...] = ()
    """Into how many continuations a conversation splits once its first turn is answered, its second, and so on: `[4]`
    with a group size of eight makes two first turns and four continuations of each. Their product divides the group
    size."""
    workers: int = Field(1, gt=0)
    """Processes in which environments and tools run."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one answer; a process that does not come back is then replaced."""
    memory_mb: int | None = Field(None, gt=0)
    """Address space limit of one of the processes."""
    on_error: Literal["tell", "end", "stop"] = "tell"
    """What a failing or hanging environment or tool means: the model is told as an answer, the sample ends, or the run
    stops."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.path is None) == (not self.tools):
            raise ValueError("name either an environment's class in path, or functions in tools")
        if self.tools and self.arguments:
            raise ValueError("arguments belong to an environment's class: tools take theirs from the model")
        if (self.parser == "regex") != (self.pattern is not None):
            raise ValueError("the parser regex and a pattern go together: give both or none of them")
        if self.path is not None and self.parser == "regex":
            raise ValueError("parser and pattern are for tools: an environment's class reads the model's turns itself")
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
        raise ValueError(f"pattern {pattern!r} has no group (?P<name>...), which tells the {tools} tools apart")


class SamplingConfig(Section):
    """Sampling parameters, named as in vLLM and transformers. GRPO with `top_p`, `top_k` or `min_p` needs
    `loss.old_logprobs: trainer`: the engine's log-probabilities are those of the tokens that are left."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 is off."""
    min_p: float = Field(0.0, ge=0, lt=1)
    max_tokens: int = Field(256, gt=0)
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay in it, as the model must learn to write them."""
    ignore_eos: bool = False


class BuiltinEngineConfig(Section):
    """Lockstep's own engine: plain torch, CPU or one GPU. On a CPU it is the faster one with small models."""

    kind: Literal["builtin"] = "builtin"
    count: int = Field(1, gt=0)
    """How many engine processes."""
    dtype: DType = "auto"
    max_rows: int = Field(256, gt=0)
    """Rows decoded together."""
    cache_tokens: int | None = Field(None, gt=0)
    """Size of the preallocated KV cache in tokens; enough for `max_rows` when absent."""
    prefix_cache: float = Field(0.5, ge=0, le=1)
    """How much of the keys and values of conversations is kept for their next turn, beside the KV cache and as a share
    of it (of `cache_tokens`; when absent, of what `max_rows` conversations take). The least recently used go first,
    all with new weights. 0 is off."""
    threads: int | None = Field(None, gt=0)
    """Torch threads of the engine; shared out evenly when absent."""
    malloc: Literal["tuned", "default"] = "tuned"
    """As `trainer.malloc`; logits of a large vocabulary are written about twice as fast."""


class VllmEngineConfig(Section):
    """vLLM (extra `vllm_choice`), on CPUs or GPUs. Fields are named as its own arguments."""

    kind: Literal["vllm"] = "vllm"
    count: int = Field(1, gt=0)
    """How many engines."""
    tensor_parallel_size: int = Field(1, gt=0)
    """GPUs (or processes) of one engine."""
    dtype: DType = "auto"
    max_num_seqs: int = Field(256, gt=0)
    """Sequences decoded together."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory for weights and K/V cache; less where the trainer shares it."""
    cpu_kv_cache_gb: float = Field(1.0, gt=0)
    """GiB of the K/V cache on a CPU."""
    enforce_eager: bool | None = None
    """No CUDA graphs, no compilation; on a CPU true when absent, else vLLM's choice."""
    enable_prefix_caching: bool = True
    """The prompt of a group is computed once; all is forgotten with new weights."""
    threads: int | None = Field(None, gt=0)
    """Torch threads of the engine on a CPU; shared out evenly when absent."""
    extra: dict[str, Any] = {}
    """Further arguments of vLLM's `EngineArgs`, as they are."""

    @model_validator(mode="after")
    def _extra_is_further(self) -> Self:
        for name, value in self.extra.items():
            field = _MODEL_FIELDS.get(name) or (f"rollout.engine.{name}" if name in type(self).model_fields else "")
            if field:
                raise ValueError(f"extra has {name}, which has a field of its own: set {field}")
            if name in _SET_BY_LOCKSTEP:
                raise ValueError(f"extra has {name}, which is set as {_SET_BY_LOCKSTEP[name]}: leave it out")
            if name in _FIXED_VALUES and value not in (None, _FIXED_VALUES[name]):
                raise ValueError(
                    f"extra has {name} {value!r}: with several batches under way, or several engines in one, nobody "
                    "could say which weights made a token; leave it out (rollout.engine.count has several engines)"
                )
        return self


_MODEL_FIELDS = {
    "model": "model.path", "revision": "model.revision", "max_model_len": "model.max_length",
    "trust_remote_code": "model.trust_remote_code",
}  # fmt: skip
_SET_BY_LOCKSTEP = {
    "logprobs_mode": "training needs it (the log-probabilities that were sampled from)",
    "skip_tokenizer_init": "the engine has a tokenizer of its own",
    "weight_transfer_config": "weights come from the trainer",
    "worker_extension_cls": "weights come from the trainer",
    "enable_sleep_mode": "placement.colocate says",
}
_FIXED_VALUES = {"async_scheduling": False, "pipeline_parallel_size": 1, "data_parallel_size": 1}
"""What may be said of them."""
VLLM_MAX_TEMPERATURE = 2.0
"""The highest temperature that vLLM takes."""


EngineConfig = Annotated[BuiltinEngineConfig | VllmEngineConfig, Field(discriminator="kind"), default_kind("builtin")]


class ReissueConfig(Section):
    """With two engines or more: a step that waits for nobody but engines far behind the others has what these owe of it
    made by others as well, with the same seeds. The completion that comes first counts."""

    enable: bool = True
    slower_than: float = Field(0.25, gt=0, lt=1)
    """Far behind is who makes less than this share of the tokens per second and sequence that the others do with about
    as many sequences (their median). Long completions alone make nobody slow, nor do many."""
    after_s: float = Field(30.0, gt=0)
    """... for this long, or no token at all for this long."""


class RolloutConfig(Section):
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = BuiltinEngineConfig()
    max_staleness: int = Field(0, ge=0)
    """How many steps older than the trained weights those that generate may be. 0 generates and trains in turn; with k,
    engines go on with the next k steps while a step is trained."""
    reissue: ReissueConfig = ReissueConfig()
    environment: EnvironmentConfig | None = None
    """Conversations with an environment or tools; plain completions when absent."""

    def check(self, sampling: SamplingConfig, field: str) -> None:
        """Raises ValueError for sampling that the engine refuses."""
        if self.engine.kind == "vllm" and sampling.temperature > VLLM_MAX_TEMPERATURE:
            raise ValueError(
                f"{field}.temperature {sampling.temperature:g} is refused by vLLM: set it to {VLLM_MAX_TEMPERATURE:g} at most, "
                "or rollout.engine.kind=builtin"
            )

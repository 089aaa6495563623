"""How completions are generated."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.base import Section, usual_kind
from lockstep.config.environment import Environment
from lockstep.config.model import DType


class Sampling(Section):
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


class BuiltinEngine(Section):
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


class VllmEngine(Section):
    """vLLM (extra `vllm`), on CPUs or GPUs. Fields are named as its own arguments."""

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
            field = _OF_MODEL.get(name) or (f"rollout.engine.{name}" if name in type(self).model_fields else "")
            if field:
                raise ValueError(f"extra has {name}, which has a field of its own: set {field}")
            if name in _OURS:
                raise ValueError(f"extra has {name}, which is set as {_OURS[name]}: leave it out")
            if name in _BATCHES and value not in (None, _BATCHES[name]):
                raise ValueError(
                    f"extra has {name} {value!r}: with several batches under way, or several engines in one, nobody "
                    "could say which weights made a token; leave it out (rollout.engine.count has several engines)"
                )
        return self


_OF_MODEL = {
    "model": "model.path", "revision": "model.revision", "max_model_len": "model.max_length",
    "trust_remote_code": "model.trust_remote_code",
}  # fmt: skip
_OURS = {
    "logprobs_mode": "training needs it (the log-probabilities that were sampled from)",
    "skip_tokenizer_init": "the engine has a tokenizer of its own",
    "weight_transfer_config": "weights come from the trainer",
    "worker_extension_cls": "weights come from the trainer",
    "enable_sleep_mode": "placement.colocate says",
}
_BATCHES = {"async_scheduling": False, "pipeline_parallel_size": 1, "data_parallel_size": 1}
"""What may be said of them."""
VLLM_HOTTEST = 2.0
"""The highest temperature that vLLM takes."""


Engine = Annotated[BuiltinEngine | VllmEngine, Field(discriminator="kind"), usual_kind("builtin")]


class Reissue(Section):
    """With two engines or more: a step that waits for nobody but engines far behind the others has what these owe of it
    made by others as well, with the same seeds. The completion that comes first counts."""

    enable: bool = True
    slower_than: float = Field(0.25, gt=0, lt=1)
    """Far behind is who makes less than this share of the tokens per second and sequence that the others do with about
    as many sequences (their median). Long completions alone make nobody slow, nor do many."""
    after_s: float = Field(30.0, gt=0)
    """... for this long, or no token at all for this long."""


class Rollout(Section):
    sampling: Sampling = Sampling()
    engine: Engine = BuiltinEngine()
    max_staleness: int = Field(0, ge=0)
    """How many steps older than the trained weights those that generate may be. 0 generates and trains in turn; with k,
    engines go on with the next k steps while a step is trained."""
    reissue: Reissue = Reissue()
    environment: Environment | None = None
    """Conversations with an environment or tools; plain completions when absent."""

    def check(self, sampling: Sampling, field: str) -> None:
        """Raises ValueError for sampling that the engine refuses."""
        if self.engine.kind == "vllm" and sampling.temperature > VLLM_HOTTEST:
            raise ValueError(
                f"{field}.temperature {sampling.temperature:g} is refused by vLLM: set it to {VLLM_HOTTEST:g} at most, "
                "or rollout.engine.kind=builtin"
            )

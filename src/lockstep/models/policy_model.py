"""The policy model: a language model that returns log-probabilities of targets instead of logits."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from lockstep.data.row_layout import RowLayout
from lockstep.models import forest_attention
from lockstep.models.attention_plan import QuerySubset
from lockstep.models.errors import ModelError
from lockstep.models.fused_decoder import FusedDecoder, UnsupportedLayers
from lockstep.models.logprob_head import LogitTransform, split_head, target_logprobs, target_renyi_entropies
from lockstep.models.vision.model_parts import ModelPart

_PEFT_LAYER = "base_layer."
_LM_PREFIX = "lm."


class PolicyModel(nn.Module):
    """Wraps any causal language model of transformers: takes packed rows, and computes the head in chunks.

    The wrapper is the root module of FSDP2, because outside of the root's forward the head's weight is a DTensor.

    Args:
        lm: an `AutoModelForCausalLM`, possibly on the meta device.

    Raises:
        ModelError: the head cannot be computed in chunks.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self.architecture = type(lm).__name__  # before a trainer changes the class, as FSDP2 does
        self._backbone_name, self.transform = self._split(lm)
        self.layout_refusal = _layout_refusal(lm, self.backbone)
        """Why the model cannot take rows of several segments; None if `probe_packing` has to find out."""
        self.frozen_parts: frozenset[ModelPart] = frozenset()
        """Parts that are not trained, not even by an adapter."""
        self.fused_decoder: FusedDecoder | None = None
        """The fused forward of the layers; None unless `fuse_layers` succeeded."""

    def _split(self, lm: Any) -> tuple[str, LogitTransform]:
        """Returns the name of the backbone, and what the model applies to the output of its head. Raises ModelError."""
        return split_head(lm)

    @property
    def config(self) -> Any:
        return self.lm.config

    @property
    def backbone(self) -> nn.Module:
        """The module that computes the last hidden states from token ids: everything except the head."""
        backbone: nn.Module = self.lm.get_submodule(self._backbone_name)
        return backbone

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = self.lm.get_output_embeddings()
        return head

    def probed(self) -> AbstractContextManager[None]:
        """Inside, the model's output depends on its hidden states by as much whatever its head is, so that layouts can
        be compared by it."""
        return nullcontext()

    @property
    def trained_beside_adapter(self) -> tuple[str, ...]:
        """Modules that are trained in full with every adapter, in addition to its `modules_to_save`."""
        return ()

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers in order: the units of sharding and of activation checkpointing."""
        count = self.config.get_text_config().num_hidden_layers
        for module in self.backbone.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return list(module)
        raise ModelError("model.path", type(self.lm).__name__, f"no list of {count} layers found", "use another model")

    def fuse_layers(self) -> str | None:
        """Replaces the forward of the decoder layers by that of `lockstep.models.fused_decoder`. Returns why it cannot,
        or None. Call it before layers are compiled, recomputed or sharded."""
        if self.layout_refusal is not None:
            return self.layout_refusal
        try:
            self.fused_decoder = FusedDecoder(self.layers, getattr(self.backbone, "norm", None))
        except UnsupportedLayers as error:
            return str(error)
        return None

    def forward(
        self,
        tokens: Tensor,
        layout: RowLayout,
        sources: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        chunk: int = 1024,
        entropy: bool = False,
        renyi_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the log-probability of each target after the path to its source.

        Args:
            tokens: int64 `[tokens]`, one packed row.
            layout: layout of that row.
            sources: int64 `[targets]`: positions of the tokens that predict the targets.
            targets: int64 `[targets]`: token ids.
            temperature: divisor of the logits.
            chunk: number of targets whose logits are computed at once.
            entropy: whether to compute entropies.
            renyi_entropy: compute Renyi entropies of order 2, which have no gradient, instead of them.

        Returns:
            (log-probabilities `[targets]`, entropies `[targets]` in nats or None), float32.

        Raises:
            ValueError: the model does not support rows of several segments (`layout_refusal`), temperature or chunk is
                not positive, or the number of tokens differs from the layout's.
        """
        chosen = self._hidden_at(tokens, layout, sources)
        return self._target_outputs(chosen, targets, temperature, chunk, entropy, renyi_entropy)

    def _target_outputs(
        self, chosen: Tensor, targets: Tensor, temperature: float, chunk: int, entropy: bool, renyi_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the outputs of `forward` from the hidden states `[targets, hidden]` at the sources."""
        if temperature <= 0 or chunk < 1:
            raise ValueError(f"temperature and chunk must be positive, got {temperature} and {chunk}")
        head = self.head
        hidden, settings = chosen.to(head.weight.dtype), (self.transform, temperature, chunk)
        logprobs, entropies = target_logprobs(hidden, head.weight, head.bias, targets, *settings, entropy)
        if renyi_entropy:
            entropies = target_renyi_entropies(hidden, head.weight, head.bias, *settings)
        return logprobs, entropies

    def _hidden_at(
        self, tokens: Tensor, layout: RowLayout, sources: Tensor, inputs: dict[str, Any] | None = None
    ) -> Tensor:
        """Computes the last hidden states at the sources, `[targets, hidden]`. Arguments and errors as in `forward`.

        Args:
            inputs: what the backbone gets instead of the tokens, such as their embeddings.
        """
        if tokens.shape != (layout.tokens,):
            raise ValueError(f"tokens {list(tokens.shape)} do not fit a layout of {layout.tokens} tokens")
        subset = self._query_subset(layout, sources)
        hidden = self._hidden(inputs or {"input_ids": tokens[None]}, layout, subset)
        if subset is not None:
            sources = subset.places_of(sources)
        # Both gather. On CUDA only indexing has a deterministic backward; on CPU only index_select has a fast one.
        return hidden.index_select(0, sources) if hidden.device.type == "cpu" else hidden[sources]

    def _query_subset(self, layout: RowLayout, sources: Tensor) -> QuerySubset | None:
        """Returns the tokens for which the last layer computes its output; None for all tokens, if that costs little
        more."""
        if self.fused_decoder is None or not self.fused_decoder.enabled or not len(sources):
            return None
        subset = QuerySubset.of_sources(layout, sources)
        return subset if subset.tokens * 16 <= layout.tokens * 15 else None

    def _hidden(self, inputs: dict[str, Any], layout: RowLayout, subset: QuerySubset | None) -> Tensor:
        """Computes the last hidden states `[subset tokens, hidden]`."""
        several = len(layout.lengths) > 1
        if several and self.layout_refusal is not None:
            raise ValueError(f"a row of {len(layout.lengths)} segments was given, but {self.layout_refusal}")
        if self.layout_refusal is not None:
            hidden: Tensor = self.backbone(**inputs, use_cache=False).last_hidden_state
            return hidden.squeeze(0)
        device = next(iter(inputs.values())).device
        positions = layout.positions().to(device).unsqueeze(-2)  # one row: [1, tokens] or [3, 1, tokens]
        subset_argument = {} if subset is None else {"subset": subset}
        with forest_attention.without_model_mask():
            hidden = self.backbone(
                **inputs, position_ids=positions, layout=layout, use_cache=False, **subset_argument
            ).last_hidden_state
        return hidden.squeeze(0)


def hf_name(policy_name: str) -> str:
    """Converts a parameter's name in the policy to that in the checkpoint: `lm.model.norm.weight` to
    `model.norm.weight`.

    Raises:
        ValueError: the name is not one of a policy's parameters.
    """
    policy_name = policy_name.replace(_PEFT_LAYER, "")
    if not policy_name.startswith(_LM_PREFIX):
        raise ValueError(
            f"{policy_name!r} is not a parameter of a PolicyModel: its name must begin with {_LM_PREFIX!r}"
        )
    return policy_name.removeprefix(_LM_PREFIX)


def policy_name(hf_name: str) -> str:
    """Converts a parameter's name in the checkpoint to that in an unwrapped policy: the inverse of `hf_name`."""
    return _LM_PREFIX + hf_name


def supports_forest_attention(lm_class: Any) -> bool:
    """Returns whether the model's attention can be set through transformers' `AttentionInterface`."""
    can_set = getattr(lm_class, "_can_set_attn_implementation", None)
    return bool(can_set is None or can_set()) and bool(getattr(lm_class, "_supports_attention_backend", True))


def _layout_refusal(lm: Any, backbone: nn.Module) -> str | None:
    name = type(lm).__name__
    if lm.config._attn_implementation != forest_attention.FOREST_ATTENTION:
        return f"{name} does not take its attention from transformers' AttentionInterface"
    parameters = inspect.signature(inspect.unwrap(backbone.forward)).parameters
    if "position_ids" not in parameters:
        return f"{name} does not accept position ids"
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return f"{name} does not pass keyword arguments to its layers"
    kinds = set(getattr(lm.config.get_text_config(), "layer_types", None) or [])
    if others := kinds - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of the kind {', '.join(sorted(others))}"
    return None

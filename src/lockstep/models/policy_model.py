"""The policy model: a language model that returns the log-probabilities of targets, never logits."""

import inspect
from typing import Any

from torch import Tensor, nn

from lockstep.data.row_layout import RowLayout
from lockstep.models import forest_attention
from lockstep.models.attention_plan import QuerySubset
from lockstep.models.errors import ModelError
from lockstep.models.fused_decoder import FusedDecoder, UnsupportedLayers
from lockstep.models.logprob_head import split_head, target_logprobs

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_layer.")
_LM_PREFIX = "lm."


class PolicyModel(nn.Module):
    """Any causal language model of transformers, over packed rows, with a chunked head.

    It is a root module of its own on purpose: the root of FSDP2 must be the module that uses the head in its forward,
    because outside of it the head's weight is a DTensor.

    Args:
        lm: an `AutoModelForCausalLM` (on the meta device, too).

    Raises:
        ModelError: a head that is not known how to apply in chunks.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self._backbone_name, self.transform = split_head(lm)
        self.layout_refusal = _layout_refusal(lm, self.backbone)
        """Why rows of several segments cannot be given to this model at all; None where `probe_packing` decides."""
        self.fused_decoder: FusedDecoder | None = None
        """None unless the layers have a fused forward (`fuse_layers`)."""

    @property
    def config(self) -> Any:
        return self.lm.config

    @property
    def backbone(self) -> nn.Module:
        """Everything but the head: token ids to last hidden states."""
        backbone: nn.Module = self.lm.get_submodule(self._backbone_name)
        return backbone

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = self.lm.get_output_embeddings()
        return head

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, first to last: the units of sharding and of activation checkpointing."""
        count = self.config.get_text_config().num_hidden_layers
        for module in self.backbone.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return list(module)
        raise ModelError("model.path", type(self.lm).__name__, f"no list of {count} layers found", "use another model")

    def fuse_layers(self) -> str | None:
        """Gives the decoder layers the forward of `lockstep.models.fused_decoder`; returns why where it cannot.
        Before they are compiled, recomputed or sharded."""
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
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of each target after its source's path.

        Args:
            tokens: int64 `[tokens]`, one packed row.
            layout: of that row.
            sources: int64 `[targets]`: the tokens after which the targets stand.
            targets: int64 `[targets]`: token ids.
            temperature: logits are divided by it.
            chunk: targets whose logits are computed at once.
            entropy: whether to compute entropies.

        Returns:
            (log-probabilities `[targets]`, entropies `[targets]` in nats or None), float32.

        Raises:
            ValueError: a row of several segments for a model that cannot have one (`layout_refusal`), a
                temperature or a chunk that is not positive, tokens that do not fit the layout.
        """
        if temperature <= 0 or chunk < 1:
            raise ValueError(f"temperature and chunk must be positive, got {temperature} and {chunk}")
        if tokens.shape != (layout.tokens,):
            raise ValueError(f"tokens {list(tokens.shape)} do not fit a layout of {layout.tokens} tokens")
        subset = self._query_subset(layout, sources)
        hidden = self._hidden(tokens, layout, subset)
        if subset is not None:
            sources = subset.places_of(sources)
        # Both gather; on CUDA only indexing has a deterministic backward, on CPU only index_select has a fast one.
        chosen = hidden.index_select(0, sources) if hidden.device.type == "cpu" else hidden[sources]
        head = self.head
        return target_logprobs(
            chosen.to(head.weight.dtype), head.weight, head.bias, targets, self.transform, temperature, chunk, entropy
        )

    def _query_subset(self, layout: RowLayout, sources: Tensor) -> QuerySubset | None:
        """The tokens for which the last layer does all of its work; None for all of them, where little is saved."""
        if self.fused_decoder is None or not self.fused_decoder.enabled or not len(sources):
            return None
        subset = QuerySubset.of_sources(layout, sources)
        return subset if subset.tokens * 16 <= layout.tokens * 15 else None

    def _hidden(self, tokens: Tensor, layout: RowLayout, subset: QuerySubset | None) -> Tensor:
        """Last hidden states `[subset tokens, hidden]`."""
        several = len(layout.lengths) > 1
        if several and self.layout_refusal is not None:
            raise ValueError(f"a row of {len(layout.lengths)} segments was given, but {self.layout_refusal}")
        if self.layout_refusal is not None:
            hidden: Tensor = self.backbone(input_ids=tokens[None], use_cache=False).last_hidden_state
            return hidden[0]
        positions = layout.positions().to(tokens.device)
        more = {} if subset is None else {"subset": subset}
        with forest_attention.without_model_mask():
            hidden = self.backbone(
                input_ids=tokens[None], position_ids=positions[None], layout=layout, use_cache=False, **more
            ).last_hidden_state
        return hidden[0]


def hf_name(policy_name: str) -> str:
    """The checkpoint's name of a parameter, from the policy's: `lm.model.norm.weight` -> `model.norm.weight`.

    Raises:
        ValueError: not a name of a policy.
    """
    for wrapper in _WRAPPERS:
        policy_name = policy_name.replace(wrapper, "")
    if not policy_name.startswith(_LM_PREFIX):
        raise ValueError(
            f"{policy_name!r} is not a parameter of a PolicyModel: its name must begin with {_LM_PREFIX!r}"
        )
    return policy_name.removeprefix(_LM_PREFIX)


def policy_name(hf_name: str) -> str:
    """The policy's name of a parameter, from the checkpoint's; the inverse of `hf_name` for an unwrapped policy."""
    return _LM_PREFIX + hf_name


def supports_forest_attention(lm_class: Any) -> bool:
    """Whether the model's attention goes through transformers' `AttentionInterface`."""
    can_set = getattr(lm_class, "_can_set_attn_implementation", None)
    return bool(can_set is None or can_set()) and bool(getattr(lm_class, "_supports_attention_backend", True))


def _layout_refusal(lm: Any, backbone: nn.Module) -> str | None:
    name = type(lm).__name__
    if lm.config._attn_implementation != forest_attention.FOREST_ATTENTION:
        return f"{name} does not take its attention from transformers' AttentionInterface"
    parameters = inspect.signature(inspect.unwrap(backbone.forward)).parameters
    if "position_ids" not in parameters:
        return f"{name} takes no positions"
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return f"{name} hands no keywords on to its layers"
    kinds = set(getattr(lm.config.get_text_config(), "layer_types", None) or [])
    if others := kinds - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of the kind {', '.join(sorted(others))}"
    return None

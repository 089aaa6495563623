"""Reward models and critics: a language model whose head gives a score instead of logits.

They are transformers' `*ForSequenceClassification` models with one label. Other projects name the head's weight
differently (`HEAD_NAMES`); it is read under each of these names and written as `score.weight`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lockstep.data.row_layout import RowLayout
from lockstep.models.errors import ModelError
from lockstep.models.logprob_head import LogitTransform, replaced_backbone
from lockstep.models.policy_model import PolicyModel
from lockstep.models.weight_conversion import TensorSource

HEAD = "score"
HEAD_WEIGHT = f"{HEAD}.weight"
HEAD_NAMES = (HEAD, "value_head", "reward_head", "v_head", "rm_head")
"""Names of the head's module: transformers', and those of OpenRLHF and of TRL's value models."""


class ScoreModel(PolicyModel):
    """Wraps a `*ForSequenceClassification` model with one label, as `PolicyModel` does language models.

    Raises:
        ModelError: the score is not a linear map of the last hidden state.
    """

    _probed = False
    has_new_head = False
    """Whether the head is new, because the model was loaded from a language model's checkpoint."""

    def _split(self, lm: Any) -> tuple[str, LogitTransform]:
        _check_head(lm)
        return str(lm.base_model_prefix), LogitTransform()

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = self.lm.get_submodule(HEAD)
        return head

    @property
    def trained_beside_adapter(self) -> tuple[str, ...]:
        return (HEAD,)

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
    ) -> tuple[Tensor, None]:
        """Computes a score for the path to each source; `targets` and the arguments after it have no effect.

        Returns:
            (scores float32 `[targets]`, None).

        Raises:
            ValueError: as in `PolicyModel.forward`.
        """
        chosen, head = self._hidden_at(tokens, layout, sources).float(), self.head
        if self._probed:
            return chosen @ _probe_direction(chosen), None
        # In float32 also beside weights in 16 bits, which would give many pairs equal scores. Cloned, because FSDP2
        # registers its backward hook on the root's output and warns if that is a view.
        scores: Tensor = linear(chosen, head.weight.float())[:, 0]
        return scores.clone(), None

    @contextmanager
    def probed(self) -> Iterator[None]:
        self._probed = True
        try:
            yield
        finally:
            self._probed = False


def _probe_direction(hidden: Tensor) -> Tensor:
    """A fixed direction of unit length in the hidden states, `[hidden]`."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(hidden.shape[-1], generator=generator)
    unit: Tensor = direction / direction.norm()
    return unit.to(hidden.device)


def find_head(names: Sequence[str]) -> str | None:
    """Returns the name of the head's weight among those of a checkpoint, `score.weight` first; None without a head."""
    candidates = [f"{head}{part}.weight" for head in HEAD_NAMES for part in ("", ".summary")]
    return next((name for name in candidates if name in names), None)


@dataclass(slots=True)
class HeadWeight:
    """The head's weight in a checkpoint, or a new one."""

    hidden: int
    stored: str | None
    """The name in the checkpoint; None for a new head: normal with variance 1 / (hidden + 1), as in OpenRLHF."""
    seed: int = 0
    """The seed of a new head."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, self.hidden)

    def rows(self, checkpoint: TensorSource, start: int, stop: int) -> Tensor:
        """Reads rows `start` to `stop` of the weight, of which there is one."""
        if self.stored is not None:
            return checkpoint.part(self.stored, start, stop)
        generator = torch.Generator().manual_seed(self.seed)
        weight: Tensor = torch.randn(1, self.hidden, generator=generator) / (self.hidden + 1) ** 0.5
        return weight[start:stop]


def locate_head(model: ScoreModel, checkpoint: TensorSource, folder: str, seed: int | None) -> HeadWeight:
    """Finds the head of a model in a checkpoint.

    Args:
        seed: the seed of a new head, if the checkpoint is one of a language model; None to refuse it.

    Raises:
        ModelError: the head has several labels, a bias or another shape, or there is none although there should be.
    """
    hidden, stored = model.head.in_features, find_head(checkpoint.names)
    if stored is None:
        if seed is None or is_reward_model(model.config):
            problem = f"it has no head that gives a score (a weight named {', '.join(HEAD_NAMES)})"
            raise ModelError("model.path", folder, problem, "give a complete reward model")
        return HeadWeight(hidden, None, seed)
    shape = checkpoint.shape(stored)
    if shape != (1, hidden):
        problem = f"its head {stored} has shape {shape}, expected (1, {hidden})"
        if len(shape) == 2 and shape[0] > 1:
            problem = f"its head {stored} has {shape[0]} labels, and a reward model has one"
        raise ModelError("model.path", folder, problem, "give a reward model, or a language model for a new head")
    if not checkpoint.read(stored).is_floating_point():
        problem = f"its head {stored} is quantized"
        raise ModelError("model.path", folder, problem, "give a checkpoint in a floating-point type")
    bias = f"{stored.removesuffix('weight')}bias"
    if bias in checkpoint.names and bool(checkpoint.read(bias).any()):
        problem = f"its head has a bias ({bias}), which transformers' classes do not have"
        raise ModelError("model.path", folder, problem, "set the bias to zero: it only shifts the scores")
    return HeadWeight(hidden, stored)


def set_padding_for_scores(tokenizer: Any) -> int | None:
    """Sets the padding token of a tokenizer, and returns it for the config of its model, so that transformers scores
    the last token of a text. Its classes score the last token that is not padding; if texts are padded with the
    end-of-sequence token, that is the token before it. Without another special token there is no padding, and
    transformers scores one text at a time."""
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        others = [token for token in tokenizer.all_special_tokens if token != tokenizer.eos_token]
        tokenizer.pad_token = others[0] if others else None
    padding: int | None = tokenizer.pad_token_id
    return padding


def is_reward_model(config: Any) -> bool:
    """Whether a checkpoint's config says that it has a head for scores."""
    kinds = ("SequenceClassification", "TokenClassification", "Reward", "Critic", "ValueHead")
    return any(kind in name for name in getattr(config, "architectures", None) or [] for kind in kinds)


def _check_head(lm: Any) -> None:
    """Compares the model's own score of random hidden states with the linear map that `ScoreModel` computes. Raises
    ModelError."""
    head: Any = getattr(lm, HEAD, None)
    problem = "it has no linear head named `score`"
    if isinstance(head, nn.Linear) and not any(name == "bias" for name, _ in head.named_parameters()):
        generator = torch.Generator().manual_seed(0)
        small = nn.Linear(head.in_features, 1, bias=False)
        hidden = torch.randn(1, 3, head.in_features, generator=generator)
        with torch.no_grad():
            small.weight.copy_(torch.randn(small.weight.shape, generator=generator))
        pad = lm.config.get_text_config().pad_token_id
        tokens = torch.full((1, 3), 1 if pad == 0 else 0)
        setattr(lm, HEAD, small)
        try:
            with replaced_backbone(lm.base_model, hidden), torch.no_grad():
                found = lm(input_ids=tokens, use_cache=False).logits.float()
            expected = linear(hidden[:, -1], small.weight)
            if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                return
            problem = "its score is not a linear map of the last hidden state"
        except (TypeError, AttributeError, RuntimeError, LookupError, NotImplementedError) as error:
            problem = f"its head cannot be separated from its backbone ({error})"
        finally:
            setattr(lm, HEAD, head)
    raise ModelError("model.path", type(lm).__name__, problem, "use another model")

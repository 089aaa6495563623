"""Loads the model of a run, of a checkpoint or of an export with its tokenizer, and generates with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM

from lockstep.data.samples import Group
from lockstep.models.folder_digests import check_digests
from lockstep.models.hf_checkpoint import resolve_folder
from lockstep.models.huggingface import quiet_transformers
from lockstep.models.model_loader import load_tokenizer, resolve_dtype
from lockstep.run.trained_models.generation import PromptChoice, SamplingChoice, open_model
from lockstep.run.trained_models.generation import generate as generate_completions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A model with its tokenizer, and where they come from."""

    model: "PreTrainedModel"
    """A causal language model of transformers, in evaluation mode."""
    tokenizer: "PreTrainedTokenizerBase"
    source: str
    """The run, folder or hub name that it was loaded from."""
    steps: int
    """The number of steps after which it was taken from its run; 0 if unknown."""
    step: str | None = None
    """The checkpoint of a run, by the number of steps; None for other sources."""


def load_policy(source: str | Path, step: int | str | None = None, device: str = "cpu") -> LoadedPolicy:
    """Loads a model and its tokenizer, in this process.

    Args:
        source: a run, a checkpoint, an export, an adapter (which is merged), a folder of Hugging Face, or a hub name.
        step: of a run: `last` (if absent), `best`, or a number of steps done.
        device: where the weights go. On a CPU they are float32, elsewhere as the run computes.

    Raises:
        RunRefused, LedgerError, ModelError, CheckpointError: there is no such model, or it cannot be read.
    """
    chosen = None if step is None else str(step)
    with open_model(str(source), chosen, None, (), lambda text: None) as loaded:
        model, is_run = loaded.model, loaded.target.step is not None
        folder = resolve_folder(model.path, model.revision)
        check_digests(folder)
        with quiet_transformers():
            lm = AutoModelForCausalLM.from_pretrained(
                folder, dtype=resolve_dtype(model.dtype, device), trust_remote_code=model.trust_remote_code
            )
        place = str(loaded.target.run) if is_run else loaded.target.path
        return LoadedPolicy(
            lm.to(device).eval(), load_tokenizer(model), place, loaded.steps, str(loaded.steps) if is_run else None
        )


def generate(
    policy: LoadedPolicy | str | Path,
    prompts: Sequence[str] | Sequence[Mapping[str, Any]],
    n: int = 1,
    *,
    step: int | str | None = None,
    seed: int | None = None,
    chat: bool | None = None,
    overrides: Sequence[str] = (),
    **sampling: Any,
) -> list[Group]:
    """Completes prompts, as `lockstep generate` does: with engines in processes of their own, which read the weights
    from where the policy was loaded. Changes that you made to `policy.model` have no effect on them; for those there
    is `policy.model.generate`.

    Args:
        policy: a loaded policy, or what `load_policy` takes.
        prompts: texts, or rows of a dataset (`{"prompt": ...}`, also with messages).
        n: the number of completions of each prompt.
        step: of a run that is named: which checkpoint.
        seed: the run's if absent. The same seed gives the same completions.
        chat: whether to apply the chat template to texts; as in the run if absent.
        overrides: changes to the run's config, such as `rollout.engine.kind=vllm`.
        **sampling: fields of `rollout.sampling`: `temperature`, `top_p`, `top_k`, `min_p`, `max_tokens`, `stop`,
            `ignore_eos`; the run's if absent.

    Returns:
        The prompts in order, each with its completions.

    Raises:
        RunRefused, LedgerError, ConfigError, DataError, ModelError, CheckpointError: the model, the prompts or the
            sampling parameters cannot be used.
        RemoteError, WorkerDied, Stalled: generation failed.
    """
    if isinstance(policy, LoadedPolicy):
        source, chosen = policy.source, policy.step
    else:
        source, chosen = str(policy), None if step is None else str(step)
    texts = [each for each in prompts if isinstance(each, str)]
    rows = [dict(each) for each in prompts if not isinstance(each, str)]
    if texts and rows:
        raise ValueError("the prompts are texts and rows: give one of the two")
    choice = PromptChoice(texts=texts, rows=rows, chat=chat)
    return generate_completions(source, chosen, choice, SamplingChoice(n, seed, sampling), overrides)[1]

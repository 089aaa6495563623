"""Supervised fine-tuning."""

from lockstep.config.recipes import SFTConfig
from lockstep.data.forest_builder import forest_from_documents
from lockstep.run.run import Run


def sft(run: Run, cfg: SFTConfig) -> None:
    """Minimises the cross-entropy of the answers' tokens. Documents of a step are packed together, but isolated."""
    for step in run.steps():
        with run.transaction(step):
            with run.stage("pack"):
                documents = run.documents(step, cfg.batch_size)
                batch = run.policy.pack(forest_from_documents(documents), cfg.token_budget)
            with run.stage("train"):
                stats = [run.policy.step(minibatch) for minibatch in batch.minibatches(objective=cfg.loss)]
            run.commit(step, stats)

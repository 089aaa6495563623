"""`lockstep push`: uploads a model to the Hugging Face hub."""

from typing import Annotated

import typer

from lockstep.base.text import count_noun
from lockstep.cli.terminal import FAILED, REFUSED, print_text, require_extra
from lockstep.report.command_events import TERMINAL


def command(
    model: Annotated[
        str, typer.Argument(help="A run, one of its checkpoints, or a folder with an exported model or adapter.")
    ],
    repository: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub; created if it does not exist.")
    ],
    step: Annotated[
        str | None, typer.Option(help="Of a run: which checkpoint, by the number of steps done.", metavar="N|best|last")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Of a run: upload the adapter alone, for peft.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Only you may see the repository.")] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="A branch, created if it does not exist; main when absent.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Upload nothing: print the model card and the files.")
    ] = False,
) -> None:
    """Upload the model of a run, or an exported one, to the Hugging Face hub, with a model card.

    The card of a run says from which model, how and on what it was trained, how it evaluates, and how to load it. A
    folder is uploaded as it is, with its README.md. Needs a token: `hf auth login`, or HF_TOKEN.

    Examples:

        lockstep push runs/sort-grpo OWNER/sort-grpo --step best --private

        lockstep push runs/sort-grpo OWNER/sort-grpo --dry-run
    """
    require_extra("train", "lockstep push")
    from lockstep.ledger.errors import LedgerError
    from lockstep.run.errors import RunRefused
    from lockstep.run.trained_models.hub_push import HubRepository, PushFailed, push_model
    from lockstep.train.errors import CheckpointError

    try:
        target = HubRepository(repository, private, revision)
        pushed = push_model(model, target, step, adapter, dry_run, TERMINAL.progress)
    except PushFailed as error:
        TERMINAL.refuse(error)
        raise typer.Exit(FAILED) from error
    except (RunRefused, LedgerError, CheckpointError, ValueError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    size = f"{count_noun(len(pushed.files), 'file')}, {sum(pushed.files.values()) / 1e6:,.1f} MB"
    if pushed.url:
        print_text(f"{pushed.url} ({size})")
        return
    for name, count in pushed.files.items():
        print_text(f"{count:>14,} {name}")
    print_text(f"{repository}: {size} would be uploaded\n\n{pushed.card}")

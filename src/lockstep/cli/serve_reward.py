"""`lockstep serve-reward`: serves a reward model over HTTP."""

import logging
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.terminal import REFUSED, require_extra
from lockstep.report.command_events import TERMINAL

if TYPE_CHECKING:
    from lockstep.config.model import ModelConfig

TOKEN_VARIABLE = "LOCKSTEP_REWARD_TOKEN"


class Precision(StrEnum):
    """The values of `model.dtype`."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def command(
    model: Annotated[str, typer.Argument(metavar="PATH", help="An exported reward model, or its name on the hub.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 5000,
    token: Annotated[bool, typer.Option("--token/--no-token", help="Whether clients need the token.")] = True,
    name: Annotated[str | None, typer.Option(help="The model's name in answers; PATH when absent.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision on the hub.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Another folder or hub name for the tokenizer.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")] = "auto",
    dtype: Annotated[
        Precision, typer.Option(help="Compute precision; auto: float32 on CPU, bfloat16 on GPU.")
    ] = Precision.auto,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads.")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Longer texts are cut on the left.")] = None,
    token_budget: Annotated[int, typer.Option(min=2, help="Tokens per packed row.")] = 4096,
    max_waiting: Annotated[int, typer.Option(min=1, help="Texts that wait; more are refused with 429.")] = 2048,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections; OpenRLHF opens one for each completion. More are refused with 503.")
    ] = 2048,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest request.")] = 16.0,
) -> None:
    """Serve a reward model over HTTP, in the forms of OpenRLHF and vLLM.

    /get_reward answers as OpenRLHF's serve_rm does, /classify and /pooling as vLLM does.

    Clients send a token as `Authorization: Bearer`: the content of LOCKSTEP_REWARD_TOKEN, else of
    ~/.lockstep/reward_token. `/health` needs none. Ctrl-C answers the requests in progress and ends.

    Examples:

        lockstep serve-reward runs/chat-reward/export --port 5000
    """
    require_extra("serve", "lockstep serve-reward")
    from lockstep.base.network import listen
    from lockstep.report.warning_handler import WarningHandler
    from lockstep.run.trained_models.local_reward_model import LocalRewardModel
    from lockstep.run.trained_models.reward_server import RewardServer, ServerLimits, run_server
    from lockstep.train.rank_service import choose_device

    logging.getLogger().addHandler(WarningHandler(TERMINAL.progress, logging.INFO))
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        given = os.environ.pop(TOKEN_VARIABLE, None)
        secret = _token(given) if token else None
        settings = _model_settings(model, revision, tokenizer, dtype, max_length)
        TERMINAL.progress(f"loading {model}")
        loaded = LocalRewardModel(settings, choose_device(device, 0), token_budget, threads)
        limits = ServerLimits(
            max_waiting,
            max_body_bytes=int(max_body_mb * 2**20),
            connections=_connections(max_connections),
            batch_tokens=4 * token_budget,
        )
        server = RewardServer(loaded, name or model, secret, limits)
        listening = listen(host, (port, port))
    except (ValueError, RuntimeError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    _show_access(host, secret is not None, given is not None)
    address = f"{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    TERMINAL.progress(f"serving {model} at http://{address}")
    run_server(server, listening)


def _model_settings(
    model: str, revision: str | None, tokenizer: str | None, dtype: Precision, max_length: int | None
) -> "ModelConfig":
    """The model as a config names it. Raises ValueError if it cannot be one."""
    from lockstep.config.model import ModelConfig

    folder = Path(model).expanduser()
    values = {
        "path": str(folder.absolute()) if folder.is_dir() else model,
        "revision": revision,
        "tokenizer": tokenizer,
        "dtype": dtype.value,
        "max_length": max_length,
    }
    return ModelConfig.model_validate(values)


def _show_access(host: str, needs_token: bool, own_token: bool) -> None:
    """Says which token clients need, unless the user set it."""
    from lockstep.base.transport.run_token import reward_token_path

    if not needs_token:
        TERMINAL.note(f"whoever reaches {host} can use this server: it needs no token")
    elif not own_token:
        TERMINAL.note(f"the token is in {reward_token_path()}")


def _connections(wanted: int) -> int:
    """The number of connections that the limit of open files allows, at most `wanted`. Says so if they are fewer."""
    from lockstep.base.text import count_noun
    from lockstep.report.server_connections import possible_connections

    possible = possible_connections(wanted)
    if possible < wanted:
        most = count_noun(possible, "connection")
        TERMINAL.note(f"{most} at most: the limit of open files (ulimit -Hn) allows no more")
    return possible


def _token(given: str | None) -> str:
    """The token that clients need: the content of the variable, or of the file if there is no variable.

    Raises:
        ValueError: it cannot be a token, or can be guessed (WeakToken).
        PermissionError: other users can read the file.
    """
    from lockstep.base.transport.run_token import (
        REWARD_POWER,
        TOKEN_COMMAND,
        check_token,
        reward_token_path,
        token_of_file,
    )

    if given is None:
        return token_of_file(reward_token_path(), TOKEN_VARIABLE, REWARD_POWER)
    token = given.strip()  # a file that a shell reads ends with a newline
    if not re.fullmatch(r"[!-~]+", token):
        problem = "is empty" if not token else "has characters that a header cannot have"
        raise ValueError(
            f"{TOKEN_VARIABLE} {problem}: unset it, or make one: export {TOKEN_VARIABLE}=$({TOKEN_COMMAND})"
        )
    return check_token(token, TOKEN_VARIABLE, REWARD_POWER)

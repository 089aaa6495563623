"""What the supervisor watches for, and what is restarted after a failure."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from lockstep.config.section import Section


class RestartBudget(Section):
    """The number of restarts within a period; the next failure stops the run, which can be resumed."""

    max_restarts: int = Field(5, ge=0)
    """0 disables restarts."""
    window_s: float = Field(3600.0, gt=0)
    """Only restarts within this period count."""


class RecoveryConfig(Section):
    """Restarts by role: an engine or the reference without the trainer, the trainer while all others keep running."""

    enable: bool = True
    """False stops the run at the first failure of an engine, a trainer rank or a rank of a served model."""
    policy: RestartBudget = RestartBudget()
    """For the trainer ranks, which are restarted together; each trained role has a budget of this size."""
    rollout: RestartBudget = RestartBudget()
    """For each engine."""
    reference: RestartBudget = RestartBudget()
    """For the ranks of the reference model, which are restarted together."""
    reward_model: RestartBudget = RestartBudget()
    """For the ranks of each reward model, which are restarted together."""
    fewer_ranks: bool = False
    """Continue with fewer trainer ranks when a replacement repeatedly does not start. The results then equal those of a
    run without a fault to about 1e-5 instead of bitwise."""
    memory_copy: bool | Literal["auto"] = "auto"
    """Keep a copy of the trainer's state in shared memory after every step, so that a fault repeats only the current
    step instead of all steps since the checkpoint. `auto`: if two copies fit into memory."""


class WatchConfig(Section):
    """A supervisor process: it reports which process the others wait for, since when, and in which line."""

    enable: bool = True
    notice_s: float = Field(3.0, gt=0)
    """Report a wait in which nothing has moved for this long. No action is taken."""
    confirm_after_s: float = Field(40.0, gt=0)
    """Blame a live process that others wait for after this long without CPU, I/O or progress, in the same line of code;
    later if the same stage has taken longer before. A process that is dead, stopped or in a deadlock is blamed at
    once."""
    on_stall: Literal["report", "dump", "recover"] = "recover"
    """The action on a confirmed stall: write an incident (`report`), with native stacks (`dump`), or also pass it to
    `recovery` and release the ranks that wait for it in a collective (`recover`)."""


class StoreConfig(Section):
    """Where the run is copied while it trains, so that another machine can resume it (docs/stores.md). The address
    alone will do: `store: s3://bucket/prefix`."""

    url: str
    """`s3://BUCKET/PREFIX`, for any S3-compatible store, or `file:///FOLDER` on a disk that machines share. The run is
    below it, by its name. Credentials come from the AWS environment or profile, never from here."""
    finish_s: float = Field(300.0, gt=0)
    """How long the end of the run waits for uploads that move no bytes, before it says what is missing and fails."""

    @model_validator(mode="before")
    @classmethod
    def _from_url(cls, values: Any) -> Any:
        return {"url": values} if isinstance(values, str) else values

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        protocol, _, rest = url.partition("://")
        if protocol not in ("s3", "file", "memory") or not rest.strip("/"):
            raise ValueError(f"{protocol or url!r} is no store: write s3://BUCKET/PREFIX or file:///FOLDER")
        if protocol == "file" and not rest.startswith("/"):
            raise ValueError(f"{url!r} is not absolute: write file:///FOLDER")
        if "@" in rest.partition("/")[0]:
            remedy = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise ValueError(f"the address of a store has no credentials: {remedy}")
        return url

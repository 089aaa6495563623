"""The shape of a knowledge file. `docs/knowledge.md` tells it to those who write rules."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lockstep.doctor.literals import parsed

Classes = Literal[
    "rendezvous_incomplete", "master_unreachable", "port_in_use", "wrong_network_interface", "network_blocked",
    "ib_rdma_fault", "os_limits", "p2p_path_broken", "shm_too_small", "gpu_binding", "gpu_hardware_fault",
    "cuda_kernel_error", "rank_oom", "host_oom", "rank_exception_masked", "uneven_data", "rank_divergent_branch",
    "zero3_generate_desync", "slow_rank_preprocess", "checkpoint_timeout", "slow_collective_timeout", "framework_bug",
    "version_mismatch", "vllm_engine_failure", "vllm_weight_sync", "mp_start_method", "ray_resources_pending",
    "ray_node_or_gcs", "remote_service_timeout", "nan_or_inf", "watchdog_or_heartbeat", "external_kill",
    "storage_fault", "config_error", "benign", "unknown",
]  # fmt: skip
Role = Literal["cause", "sign", "victim", "context", "healthy"]
"""cause: shows the class by itself; sign: supports it; victim: a consequence of something else; context: says a fact;
healthy: argues that nothing is wrong."""
Kinds = Literal["log", "kernel", "stack", "process", "gpu", "environment"]
"""Of what a file is: console and framework logs; dmesg and syslog; py-spy, faulthandler, gdb; ps and top; nvidia-smi
and its CSV; `env` and `pip list`. A line of a log can be of another kind too (a kernel line in a console)."""
PARTY_GROUPS = ("rank", "host", "address", "interface", "device", "peer", "port", "service", "pid")
"""Names of groups that `culprit: {group: ...}` may point to and that become culprits."""

Identifier = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=64)]
Url = Annotated[str, Field(pattern=r"^https?://")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Condition(_Model):
    """Something else that was seen in the same attempt, in a relation to the sighting that asks.

    Exactly one of `id` (a signature), `class` (any cause or sign of it), `fact` (see `facts.yaml`), `story` (what the
    structure of the job says, see `story.TRAITS`) or `any` (one of several conditions).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    id: str | None = None
    cls: Classes | None = Field(None, alias="class")
    fact: str | None = None
    story: str | None = None
    any: "tuple[Condition | str, ...]" = ()
    who: Literal["same", "other", "any"] = "any"
    """Said by the same rank or host, or by another one. One who is not known is neither."""
    when: Literal["before", "after", "any"] = "any"
    within_s: Annotated[float, Field(gt=0)] | None = None
    within_lines: Annotated[int, Field(gt=0)] | None = None
    """So many lines away at most, in the same file."""
    matches: dict[str, str] = {}
    """Field of the other sighting -> regular expression that its value matches as a whole."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if sum(bool(each) for each in (self.id, self.cls, self.fact, self.story, self.any)) != 1:
            raise ValueError("name exactly one of id, class, fact, story, any")
        return self


class Culprit(_Model):
    """Who is to blame: what the groups of the pattern captured, or all who say such a line."""

    group: str | tuple[str, ...]
    fact: str | tuple[str, ...] | None = None
    """The groups are those of this fact's sightings in the same attempt, of several facts those of the first that was
    seen: an interface that is set on another line."""
    all: bool = False
    """All groups that captured something, not the first of them, and all places of the line that the pattern fits."""

    @property
    def facts(self) -> tuple[str, ...]:
        return (self.fact,) if isinstance(self.fact, str) else self.fact or ()


class Signature(_Model):
    id: Identifier
    pattern: str | None = None
    patterns: tuple[str, ...] = ()
    """Alternatives of `pattern`. One of both is needed."""
    literals: tuple[str, ...] = ()
    """For the prefilter, where no text of 4 characters follows from the pattern: each match contains one of these."""
    match: Literal["line", "exception"] = "line"
    """exception: matched against `module.Type: message` of an assembled traceback, messages of several lines whole."""
    frames: str | None = None
    """Of `exception`: matched against the frames, one per line: `file:line in function: source text`."""
    lines: Annotated[int, Field(ge=1, le=40)] = 1
    """The pattern sees so many lines of the same speaker, joined by newlines, from the one with its literal on."""
    kinds: tuple[Kinds, ...] = ()
    """Only in files or lines of these kinds; empty: everywhere."""
    role: Role = "cause"
    strength: Annotated[float, Field(ge=0, le=1)] = 0.8
    """How sure the class is when nothing else is known."""
    needs: tuple[Condition | str, ...] = ()
    unless: tuple[Condition | str, ...] = ()
    explains: tuple[str, ...] = ()
    """Classes or ids whose sightings are consequences of this one, whatever comes first in the files."""
    culprit: Literal["line", "others", "none"] | Culprit = "line"
    """line: who says it (rank, else host); others: the known ranks or hosts that do not say it."""
    collective: str | None = None
    """The operation that it shows, where there is no group `op`."""
    fact: str | None = None
    """What it tells the story; see `facts.yaml`."""
    fatal: bool | None = None
    """False: jobs go on after it; True: they never do. None: what comes after it decides."""
    framework: tuple[str, ...] = ()
    explanation: str | None = None
    """In place of the file's, for this signature."""
    fix: str | None = None
    collect: tuple[str, ...] | None = None
    examples: tuple[str, ...] = ()
    non_examples: tuple[str, ...] = Field((), alias="not")
    sources: tuple[Url, ...] = ()

    @property
    def all_patterns(self) -> tuple[str, ...]:
        return (*((self.pattern,) if self.pattern else ()), *self.patterns)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.all_patterns:
            raise ValueError("pattern: missing")
        groups = {name for each in self.all_patterns for name in parsed(each).state.groupdict}
        if isinstance(self.culprit, Culprit):
            wanted = (self.culprit.group,) if isinstance(self.culprit.group, str) else self.culprit.group
            for each in wanted if self.culprit.fact is None else ():
                if each not in groups:
                    raise ValueError(f"culprit: the pattern has no group {each!r}, only {sorted(groups)}")
        if self.frames is not None and self.match != "exception":
            raise ValueError("frames: only with `match: exception`")
        return self

    @field_validator("pattern", "frames")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            parsed(value)
        return value

    @field_validator("patterns")
    @classmethod
    def _compile_all(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for each in values:
            parsed(each)
        return values


class Knowledge(_Model):
    """One file: a class with its signatures, or, without a class, facts."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    cls: Classes | None = Field(None, alias="class")
    title: str = ""
    explanation: str = ""
    """In plain words; `{field}` is replaced by what signatures captured, a sentence with an unknown field left out."""
    fix: str = ""
    collect: tuple[str, ...] = ()
    docs: tuple[Url, ...] = ()
    signatures: tuple[Signature, ...]

    @model_validator(mode="after")
    def _told(self) -> Self:
        for each in self.signatures:
            if self.cls is None and each.role not in ("context", "victim", "healthy"):
                raise ValueError(f"{each.id}: role {each.role} needs a class in the file")
        if self.cls is not None and not (self.title and self.explanation):
            raise ValueError("title and explanation: missing")
        return self

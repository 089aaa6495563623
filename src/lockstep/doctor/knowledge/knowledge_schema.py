"""Schema of a knowledge file; documented for rule authors in `docs/knowledge.md`."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lockstep.doctor.knowledge.regex_literals import parse_pattern

FailureClass = Literal[
    "rendezvous_incomplete", "master_unreachable", "port_in_use", "wrong_network_interface", "network_blocked",
    "ib_rdma_fault", "os_limits", "p2p_path_broken", "shm_too_small", "gpu_binding", "gpu_hardware_fault",
    "cuda_kernel_error", "rank_oom", "host_oom", "rank_exception_masked", "uneven_data", "rank_divergent_branch",
    "zero3_generate_desync", "slow_rank_preprocess", "checkpoint_timeout", "slow_collective_timeout", "framework_bug",
    "version_mismatch", "vllm_engine_failure", "vllm_weight_sync", "mp_start_method", "ray_resources_pending",
    "ray_node_or_gcs", "remote_service_timeout", "nan_or_inf", "watchdog_or_heartbeat", "external_kill",
    "storage_fault", "config_error", "benign", "unknown",
]  # fmt: skip
SignatureRole = Literal["cause", "sign", "victim", "context", "healthy"]
"""cause: proves the class by itself; sign: supports the class; victim: a consequence of another failure; context:
states a fact; healthy: a sign that nothing is wrong."""
SignatureTier = Literal["exact", "generic", "structure"]
"""exact: the wording of one program; generic: an error number, a signal or an exception class, whichever program
prints it; structure: states a fact about the job."""
LineKind = Literal["log", "kernel", "stack", "process", "gpu", "environment"]
"""Kind of a file: console and framework logs; dmesg and syslog; py-spy, faulthandler, gdb; ps and top; nvidia-smi and
its CSV; `env` and `pip list`. A line of a log can have another kind (a kernel line in a console)."""
CULPRIT_GROUPS = ("rank", "host", "address", "interface", "device", "peer", "port", "service", "pid")
"""Names of groups that `culprit: {group: ...}` may use."""

SignatureId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=64)]
Url = Annotated[str, Field(pattern=r"^https?://")]


class _KnowledgeModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RuleCondition(_KnowledgeModel):
    """A condition for a match: another match in the same attempt, in a given relation to it, or a trait of the job.

    It names exactly one of `id` (a signature), `class` (any cause or sign of a class), `fact` (see `facts.yaml`),
    `story` (a trait of the job, see `JOB_TRAITS`) or `any` (several conditions, of which one must be met).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    id: str | None = None
    cls: FailureClass | None = Field(None, alias="class")
    fact: str | None = None
    story: str | None = None
    any: "tuple[RuleCondition | str, ...]" = ()
    who: Literal["same", "other", "any"] = "any"
    """Whether the other match is from the same rank or host, or from another one. An unknown origin is neither."""
    when: Literal["before", "after", "any"] = "any"
    within_s: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _names_exactly_one(self) -> Self:
        if sum(bool(each) for each in (self.id, self.cls, self.fact, self.story, self.any)) != 1:
            raise ValueError("name exactly one of id, class, fact, story, any")
        return self


class CulpritSelector(_KnowledgeModel):
    """Names the culprits: the values that groups of the pattern captured."""

    group: str | tuple[str, ...]
    fact: str | tuple[str, ...] | None = None
    """Take the groups from the matches of this fact in the same attempt, for example an interface that another line
    names. Of several facts, the first that was matched is used."""
    all: bool = False
    """Take all groups that captured something instead of the first, and all matches of the pattern in the line."""

    @property
    def groups(self) -> tuple[str, ...]:
        return (self.group,) if isinstance(self.group, str) else self.group

    @property
    def facts(self) -> tuple[str, ...]:
        return (self.fact,) if isinstance(self.fact, str) else self.fact or ()


class FailureSignature(_KnowledgeModel):
    """A pattern of log lines or exceptions, and what a match means."""

    id: SignatureId
    pattern: str | None = None
    patterns: tuple[str, ...] = ()
    """Alternative patterns; `pattern` or `patterns` is required."""
    literals: tuple[str, ...] = ()
    """For the prefilter, if the pattern itself requires no text of 4 characters: each match contains one of these."""
    match: Literal["line", "exception"] = "line"
    """exception: the pattern is matched with `module.Type: message` of a traceback, with all lines of the message."""
    frames: str | None = None
    """For `exception`: a pattern for the frames, one per line: `file:line in function: source text`."""
    lines: Annotated[int, Field(ge=1, le=40)] = 1
    """The pattern is matched with this many lines of the same origin, joined by newlines. The first of them is the line
    that contains the literal."""
    kinds: tuple[LineKind, ...] = ()
    """The kinds of files or lines in which the pattern is searched; empty: all kinds."""
    role: SignatureRole = "cause"
    strength: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Probability of the class if nothing else is known."""
    tier: SignatureTier | None = None
    """None: derived from the patterns, see `FailureRule.tier`."""
    needs: tuple[RuleCondition | str, ...] = ()
    unless: tuple[RuleCondition | str, ...] = ()
    explains: tuple[str, ...] = ()
    """Classes or ids whose matches are consequences of a match of this signature, in whatever order they appear."""
    culprit: Literal["line", "others", "none"] | CulpritSelector = "line"
    """line: the origin of the line (its rank, else its host); others: the known ranks or hosts without such a line."""
    collective: str | None = None
    """The collective operation, if the pattern has no group `op`."""
    fact: str | None = None
    """The fact that a match states; see `facts.yaml`."""
    fatal: bool | None = None
    """False: jobs continue after such a line; True: they never do; None: the following lines decide."""
    framework: tuple[str, ...] = ()
    explanation: str | None = None
    """Replaces the file's explanation for this signature."""
    fix: str | None = None
    collect: tuple[str, ...] | None = None
    examples: tuple[str, ...] = ()
    non_examples: tuple[str, ...] = Field((), alias="not")
    sources: tuple[Url, ...] = ()

    @property
    def all_patterns(self) -> tuple[str, ...]:
        return (*((self.pattern,) if self.pattern else ()), *self.patterns)

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        if not self.all_patterns:
            raise ValueError("pattern: missing")
        groups = {name for each in self.all_patterns for name in parse_pattern(each).state.groupdict}
        if isinstance(self.culprit, CulpritSelector):
            for each in self.culprit.groups if self.culprit.fact is None else ():
                if each not in groups:
                    raise ValueError(f"culprit: the pattern has no group {each!r}, only {sorted(groups)}")
        if self.frames is not None and self.match != "exception":
            raise ValueError("frames: only with `match: exception`")
        return self

    @field_validator("pattern", "frames")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            parse_pattern(value)
        return value

    @field_validator("patterns")
    @classmethod
    def _compile_all(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for each in values:
            parse_pattern(each)
        return values


class KnowledgeFile(_KnowledgeModel):
    """A knowledge file: a failure class with its signatures, or facts without a class."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    cls: FailureClass | None = Field(None, alias="class")
    title: str = ""
    explanation: str = ""
    """For users. `{field}` is replaced by a captured group; a sentence with an unknown field is omitted."""
    fix: str = ""
    collect: tuple[str, ...] = ()
    docs: tuple[Url, ...] = ()
    signatures: tuple[FailureSignature, ...]

    @model_validator(mode="after")
    def _check_class(self) -> Self:
        for each in self.signatures:
            if self.cls is None and each.role not in ("context", "victim", "healthy"):
                raise ValueError(f"{each.id}: role {each.role} needs a class in the file")
        if self.cls is not None and not (self.title and self.explanation):
            raise ValueError("title and explanation: missing")
        return self


JOB_TRAITS = {
    "ended_well": "the last attempt reports success, and nothing fatal follows",
    "running": "the logs show no end: progress continued after all failures",
    "progressed": "the job made steps before the first failure",
    "collective_timeout": "a rank timed out in a collective",
    "peer_lost": "a rank lost the connection to a peer",
    "first_collective": "the first collective of a process group timed out",
    "saving": "a checkpoint had begun and not finished when the ranks waited",
    "crashed": "a process ended with a crash, a signal or a non-zero exit code",
    "exception": "a rank raised an exception that no collective raised",
    "many_hosts": "more than one host takes part",
    "foreign_address": "a process tried to connect to an address outside the networks of Ray's hosts",
}
"""The traits of a job, which `story:` in a condition may name."""

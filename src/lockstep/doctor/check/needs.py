"""What a run asks of its hosts, as far as a check of one host has to know."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Needs:
    """Without a config: the host by itself."""

    several: bool = False
    """Whether the run has other hosts: then addresses that only this host reaches are wrong."""
    gpus: bool = False
    """Whether it cannot do without a GPU."""
    shared: bool = False
    """Whether processes of one host exchange data in shared memory: ranks, an engine, workers."""
    packages: tuple[str, ...] = ("python", "torch", "transformers")
    """Those without which it does not start."""
    interface: str | None = None
    """`cluster.interface`: the beginning of the name of the one to use."""
    names: tuple[str, ...] = ()
    """Names of other hosts that it is given."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Purpose by folder."""
    ports: Mapping[int, str] = field(default_factory=dict)
    """Purpose by port that something of it listens on here."""

"""What of the shell's variables does not reach workers, or reaches them otherwise: told when a run starts."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.cluster.environment import Forwarded, differences, report, told
from lockstep.cluster.node import Node
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.cluster import RayCluster as Config
from lockstep.watch.folders import write_whole

log = logging.getLogger(__name__)


def tell(config: Config, given: Forwarded, nodes: Sequence[Node], file: Path) -> None:
    """Warnings for people, and all of it for the run's folder."""
    shell = {name: value for name, value in os.environ.items() if "ray.util" not in value}  # Ray's own doing here
    asker = WorkerSpec("any", "", 0, "")
    by_node = {node.info.name: differences(shell, node.environment_of(asker)) for node in nodes}
    for name, why in given.kept_back.items():
        log.warning("%s of this shell does not reach workers: %s", name, why)
    for line in told(by_node, config.env):
        log.warning("%s", line)
    write_whole(file, json.dumps(report(given, by_node), indent=2).encode())

"""The orderly end of agents: side by side, within a bound."""

import contextlib
import logging
import threading
from collections.abc import Iterable

from lockstep.cluster.base import CLOSE_GRACE_S
from lockstep.watch import waits
from lockstep.watch.agent_client import AgentClient, AgentError
from lockstep.watch.waits import WaitTimeout

log = logging.getLogger(__name__)


def leave(agents: Iterable[AgentClient]) -> None:
    """Returns when they have ended with their workers, or have been waited for long enough."""
    leaving = [threading.Thread(target=_leave, args=[agent], name="leave", daemon=True) for agent in agents]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        with contextlib.suppress(WaitTimeout):
            waits.join(thread, whom="agents", why="they leave", timeout_s=CLOSE_GRACE_S + 30.0)


def _leave(agent: AgentClient) -> None:
    with contextlib.suppress(AgentError, WaitTimeout):
        remaining = agent.leave(CLOSE_GRACE_S)
        if remaining:
            log.error("%s did not end, not even killed", ", ".join(remaining))

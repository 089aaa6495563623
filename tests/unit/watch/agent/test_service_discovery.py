import os

from lockstep.watch.agent.service_discovery import FIRST_ATTACH_S, ControllerLiveness
from lockstep.watch.procfs import processes

NOBODY = 2**22 + 1
"""A pid above the maximum."""


def test_a_controller_on_this_host_is_alive_while_its_process_is() -> None:
    local = ControllerLiveness.expected(os.getpid())
    assert local.missing_s(connected=False) is None
    ended = ControllerLiveness.expected(NOBODY)
    first, second = ended.missing_s(connected=True), ended.missing_s(connected=True)
    assert first is not None and second is not None and 0 <= first <= second
    assert ended.grace_s(0.0) == 0.0, "a process that has ended does not come back"


def test_a_controller_on_another_host_is_alive_while_it_is_connected() -> None:
    remote = ControllerLiveness(None, None, 6.0)
    assert remote.missing_s(connected=False) is not None
    assert remote.missing_s(connected=True) is None
    assert remote.missing_since is None
    assert (remote.grace_s(0.0), remote.grace_s(300.0)) == (6.0, 300.0)


def test_a_controller_that_has_not_attached_yet_has_a_minute() -> None:
    assert ControllerLiveness.expected(None).grace_s(0.0) == FIRST_ATTACH_S
    local = ControllerLiveness.expected(os.getpid())
    assert (local.start, local.patience_s) == (processes.start_ticks(os.getpid()), 0.0)

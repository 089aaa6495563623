import os

from lockstep.watch.agent.service_discovery import FIRST_ATTACH_S, ControllerLiveness
from lockstep.watch.procfs import processes

NOBODY = 2**22 + 1
"""More than a pid can be."""


def test_a_controller_of_this_host_is_there_as_long_as_its_process() -> None:
    here = ControllerLiveness.expected(os.getpid())
    assert here.missing_s(connected=False) is None
    gone = ControllerLiveness.expected(NOBODY)
    first, second = gone.missing_s(connected=True), gone.missing_s(connected=True)
    assert first is not None and second is not None and 0 <= first <= second
    assert gone.grace_s(0.0) == 0.0, "a process that has ended does not come back"


def test_a_controller_of_another_host_is_there_as_long_as_its_connection() -> None:
    elsewhere = ControllerLiveness(None, None, 6.0)
    assert elsewhere.missing_s(connected=False) is not None
    assert elsewhere.missing_s(connected=True) is None
    assert elsewhere.gone_since is None
    assert (elsewhere.grace_s(0.0), elsewhere.grace_s(300.0)) == (6.0, 300.0)


def test_one_that_has_not_come_yet_has_a_minute() -> None:
    assert ControllerLiveness.expected(None).grace_s(0.0) == FIRST_ATTACH_S
    here = ControllerLiveness.expected(os.getpid())
    assert (here.start, here.patience_s) == (processes.start_ticks(os.getpid()), 0.0)

"""Ranks of processes."""

from lockstep.doctor.logs.line_origin import LineOrigin
from lockstep.doctor.logs.rank_resolver import ranks_by_pid


def test_explicit_ranks_take_precedence() -> None:
    said = [{"pid": "7", "rank": "3", "local": "1"}, {"pid": "8", "local": "2"}, {"code": "1"}]
    assert ranks_by_pid(said, [LineOrigin(5, pid=7)], one_host=True) == {7: 3, 8: 2}
    assert ranks_by_pid(said, [], one_host=False) == {7: 3}


def test_a_pid_shared_by_two_ranks_is_ignored() -> None:
    origins = [LineOrigin(1, pid=50), LineOrigin(2, pid=51), LineOrigin(6, pid=51), LineOrigin(pid=52), LineOrigin(4)]
    assert ranks_by_pid([], origins, one_host=False) == {50: 1}

"""Which rank a process is."""

from lockstep.doctor.prefixes import Who
from lockstep.doctor.processes import ranks_of


def test_what_is_said_outright_counts_first() -> None:
    said = [{"pid": "7", "rank": "3", "local": "1"}, {"pid": "8", "local": "2"}, {"code": "1"}]
    assert ranks_of(said, [Who(5, pid=7)], one_host=True) == {7: 3, 8: 2}
    assert ranks_of(said, [], one_host=False) == {7: 3}


def test_a_number_of_two_ranks_tells_nothing() -> None:
    speakers = [Who(1, pid=50), Who(2, pid=51), Who(6, pid=51), Who(pid=52), Who(4)]
    assert ranks_of([], speakers, one_host=False) == {50: 1}

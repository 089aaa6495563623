"""The benchmark of an incident, with few hosts: a real supervisor asks some of them and loses none."""

from pathlib import Path

import pytest

from benchmarks import incident_cost
from benchmarks.incident_cost import measure, table
from lockstep.watch.supervisor.incident_selection import MAX_PEERS, SMALL_JOB, WAITS_PER_CULPRIT


@pytest.mark.slow
def test_an_incident_asks_few_hosts_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_cost, "QUIET_S", 1.0)
    hosts = 64
    found = measure(hosts, 1 << 10, tmp_path, print)
    assert hosts * incident_cost.PER_HOST > SMALL_JOB
    assert found.lost == 0 and found.asked["free"] == hosts, "all ranks get the verdict"
    for operation in ("collect", "stacks", "dump", "dumps"):
        assert 2 <= found.asked[operation] <= 1 + WAITS_PER_CULPRIT + MAX_PEERS, operation
    (gap,) = found.gaps
    assert "of 512 processes were asked" in gap
    assert 0 < found.incident_bytes < 8 << 20
    assert any("an incident" in line for line in table(found))

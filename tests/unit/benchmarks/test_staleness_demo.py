"""The two runs of `benchmarks.staleness_demo` differ in the staleness alone, and are configs that are accepted."""

from pathlib import Path

from benchmarks.staleness_demo import command
from lockstep.config.loader import load_config

ROOT = Path(__file__).parents[3]


def test_both_ways_are_the_same_run_but_for_the_staleness(tmp_path: Path) -> None:
    sync, ahead = (command(tmp_path / "model", tmp_path / "data", tmp_path, 50, staleness) for staleness in (0, 1))
    configs = [load_config(ROOT / given[4], given[5:]).model_dump() for given in (sync, ahead)]
    assert [each["rollout"].pop("max_staleness") for each in configs] == [0, 1]
    assert [each.pop("name") for each in configs] == ["ahead-0", "ahead-1"]
    assert configs[0] == configs[1]
    assert configs[0]["trainer"]["threads"] == configs[0]["rollout"]["engine"]["threads"] == 1

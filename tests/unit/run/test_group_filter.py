"""Which groups a step trains on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.algorithm import FilterGroups
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.run.group_filter import GroupFilter, NoSignal, has_signal


def group(position: int, *rewards: float, **terms: list[float]) -> Group:
    empty = np.zeros(0, np.int32)
    completion = Completion("r", empty, np.zeros(0, np.float32), empty, "stop", "")
    breakdown = {name: np.array(values, np.float32) for name, values in terms.items()}
    prompt = Prompt(f"0:{position}", position, np.array([1], np.int32), "p")
    return Group(prompt, [completion] * len(rewards), np.array(rewards, np.float32), breakdown)


def uids(selection: GroupFilter) -> list[str]:
    return [each.prompt.uid for each in selection.rollouts.groups]


def test_without_a_filter_the_first_round_is_the_step() -> None:
    selection = GroupFilter(3, 2, FilterGroups())
    assert selection.missing == 2
    with pytest.raises(ValueError, match="2 of 2 groups of step 4"):
        _ = selection.rollouts
    selection.add(Rollouts(3, 3, [group(0, 1, 1), group(1, 0, 1)]))
    assert (selection.missing, uids(selection), selection.metrics(), selection.extra) == (0, ["0:0", "0:1"], {}, {})


def test_groups_without_signal_are_replaced() -> None:
    selection = GroupFilter(0, 3, FilterGroups(enable=True))
    selection.add(Rollouts(0, 0, [group(0, 1, 1), group(1, 0, 1), group(2, 0, 0)]))
    assert selection.missing == 2
    selection.add(Rollouts(0, 0, [group(3, 1, 0), group(4, 1, 1)]))
    assert selection.missing == 1
    selection.add(Rollouts(0, 0, [group(5, 0.5, 0)]))
    assert uids(selection) == ["0:1", "0:3", "0:5"]
    assert selection.discarded == ["0:0", "0:2", "0:4"]
    assert selection.metrics() == {"rollout/rounds": 3.0, "rollout/groups_discarded": 3.0}
    stored = GroupFilter(0, 3, FilterGroups(enable=True), selection.rollouts, selection.extra)
    assert (stored.missing, stored.metrics(), stored.discarded) == (0, selection.metrics(), selection.discarded)


def test_the_last_round_fills_the_step_or_ends_the_run() -> None:
    rounds = [[group(0, 1, 1), group(1, 0, 1)], [group(2, 0, 0)]]
    filled = GroupFilter(4, 2, FilterGroups(enable=True, max_num_gen_batches=2))
    for each in rounds:
        filled.add(Rollouts(4, 4, each))
    assert uids(filled) == ["0:1", "0:0"] and filled.discarded == ["0:2"]
    strict = GroupFilter(4, 2, FilterGroups(enable=True, max_num_gen_batches=2, at_limit="error"))
    strict.add(Rollouts(4, 4, rounds[0]))
    with pytest.raises(NoSignal, match="step 5: after 2 rounds of prompts, 1 of 2 groups"):
        strict.add(Rollouts(4, 4, rounds[1]))


def test_the_metric_may_be_a_term() -> None:
    shaped = group(0, -0.5, -0.25, exact_match=[0, 0], length=[-0.5, -0.25])
    assert has_signal(shaped, "reward") and has_signal(shaped, "length")
    assert not has_signal(shaped, "exact_match"), "both wrong, one of them longer"
    assert not has_signal(group(0, 1, 0, judge=[np.nan, 1.0]), "judge"), "it applies to one only"
    assert not has_signal(group(0, 1, 0, judge=[np.nan, np.nan]), "judge")
    with pytest.raises(ValueError, match="not one of reward, exact_match, length"):
        has_signal(shaped, "math")


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(1, 8),
)
def test_every_prompt_is_trained_on_or_discarded_once(rounds: list[list[bool]], wanted: int, limit: int) -> None:
    """Whatever rounds bring, more than asked for included (a restart gives a round what it had)."""
    selection = GroupFilter(0, wanted, FilterGroups(enable=True, max_num_gen_batches=limit))
    given, signal = [], set()
    for each in rounds:
        if not selection.missing:
            break
        made = [group(len(given) + k, 1, 0 if good else 1) for k, good in enumerate(each)]
        signal |= {one.prompt.uid for one, good in zip(made, each, strict=True) if good}
        given += [one.prompt.uid for one in made]
        selection.add(Rollouts(0, 0, made))
    if selection.missing == 0:
        chosen = uids(selection)
        assert len(chosen) == wanted
        assert sorted([*chosen, *selection.discarded]) == sorted(given)
        if selection.rounds <= limit:
            assert len(set(chosen) & signal) == min(wanted, len(signal)), "none with signal is left out for one without"

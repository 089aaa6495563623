"""Prefixes of ranks and hosts that a file shows in a form of its own."""

import pytest

from lockstep.doctor.logs.learned_prefix import learn_prefixes
from lockstep.doctor.logs.line_origin import LineOrigin, origin_of_line


def of_ranks(form: str, order: str = "012120201") -> list[str]:
    return [form.format(rank) + f"step {at} loss 0.5" for at, rank in enumerate(order)]


@pytest.mark.parametrize("form", ["({}) ", "[{}] ", "<{}> ", "{{{}}}: ", "{}| ", "#{} ", "{}> "])
def test_numbers_that_alternate_are_ranks(form: str) -> None:
    learned = learn_prefixes(of_ranks(form))
    line = form.format(2) + "early stop"
    origin, at = origin_of_line(line, learned)
    assert origin == LineOrigin(2, label=2, rank_is_label=True) and line[at:] == "early stop"


def test_ranks_of_a_known_number_are_ranks_and_steps_are_not() -> None:
    learned = learn_prefixes(of_ranks("[{}/3] "))
    origin, at = origin_of_line("[1/3] early stop", learned)
    assert origin == LineOrigin(1, label=1, rank_is_label=True) and at == len("[1/3] ")
    assert not learn_prefixes(of_ranks("[{}/9] "))


def test_pods_and_their_container_come_before_ranks() -> None:
    lines = [f"ocr-worker-{rank} pytorch ({rank}) step {at}" for at, rank in enumerate("0121202010")]
    origin, at = origin_of_line("ocr-worker-1 pytorch (1) words", learn_prefixes(lines))
    assert (origin.host, origin.rank) == ("ocr-worker-1", 1) and at == len("ocr-worker-1 pytorch (1) ")
    named = [f"ocr-worker-{rank} step {at} of {rank}" for at, rank in enumerate("0121202010")]
    mixed = [*named, "ocr-worker-2 saved", "ocr-worker-0 done"]
    assert origin_of_line("ocr-worker-2 words", learn_prefixes(mixed)) == (LineOrigin(host="ocr-worker-2"), 13)


@pytest.mark.parametrize(
    "lines",
    [
        of_ranks("[{}] ", "000111222333"),
        of_ranks("[{}] ", "0123456789"),
        of_ranks("({}) ", "575757575"),
        of_ranks("step {} ", "010101010"),
        of_ranks("loss {} ", "010101010"),
        [f"[rank{rank}]: words" for rank in "0101010"],
        ["[1] 40122", "words", "[2] 40123", "[1]- Done", "[2]+ Done"],
    ],
    ids=["epochs", "list", "no-count", "steps", "values", "known", "shell-jobs"],
)
def test_counters_and_lists_are_no_prefix(lines: list[str]) -> None:
    assert learn_prefixes(lines) == ()


@pytest.mark.parametrize("form", ["{:12}| ", "12:00:01 {:9}| ", "a1b2c3 || <{}> ", "{} > ", "({}) "])
def test_words_that_come_again_in_a_column_name_the_process(form: str) -> None:
    names = [["proc.0", "proc.1"][at % 2] for at in range(12)]
    learned = learn_prefixes([form.format(each) + f"loss 0.{at}" for at, each in enumerate(names)])
    line = form.format("proc.1") + "early stop"
    origin, at = origin_of_line(line, learned)
    assert (origin.rank, line[at:]) == (1, "early stop")
    names = [["scorer", "sampler-0", "trainer"][at % 3] for at in range(12)]
    learned = learn_prefixes([form.format(each) + f"loss 0.{at}" for at, each in enumerate(names)])
    assert origin_of_line(form.format("scorer") + "words", learned)[0].role == "scorer"


def test_the_column_of_a_logger_names_no_process() -> None:
    lines = [f"INFO | {['data', 'model'][at % 2]} | words {at % 4}" for at in range(12)]
    origin, at = origin_of_line("INFO | data | words", learn_prefixes(lines))
    assert not origin.role and "INFO | data | words"[at:] == "words"

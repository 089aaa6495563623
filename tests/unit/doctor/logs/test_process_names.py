"""What launchers call the processes of a job, in names of files, of parties and before lines."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.doctor.logs import process_names
from lockstep.doctor.logs.line_origin import origin_of_file, origin_of_line

WORDS = ("rank", "task", "proc", "process", "trainer", "learner", "member", "peer", "stage", "workerlog", "r", "w")


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("log/workerlog.3", 3),
        ("log/workerlog.12", 12),
        ("rank.3.log", 3),
        ("horovod/rank.003/stderr", 3),
        ("rank3.log.1", 3),
        ("process_index_3.log", 3),
        ("trainer_id_4.log", 4),
        ("process-3-of-8.log", 3),
        ("train.log.3", None),
        ("serverlog.0", None),
        ("job-3-xk2lp.log", None),
    ],
)
def test_the_rank_in_the_name_of_a_file(name: str, rank: int | None) -> None:
    origin, _ = origin_of_file(name)
    assert origin.rank == rank and not origin.host


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[1,3]<stderr>:words", 3),  # Open MPI 4, and horovodrun with it
        ("[prterun-nd1-1234@1,3]<stdout>: words", 3),  # Open MPI 5
        ("[3]<stderr>:words", 3),  # horovodrun with Gloo
        ("[1,mpirank:3,algo-1]<stdout>:words", 3),  # SageMaker
        ("[process 3 of 8] words", 3),
        ("[process_index=3] words", 3),
        ("[trainer_id 3] words", 3),
        ("task 3: words", 3),
        ("Process 41207: words", None),
        ("[3] words", None),
    ],
)
def test_the_rank_before_a_line(line: str, rank: int | None) -> None:
    origin, at = origin_of_line(line, ())
    assert origin.rank == rank
    assert rank is None or line[at:].strip() == "words"


@pytest.mark.parametrize(
    ("party", "number"),
    [("rank-3", "3"), ("trainer_2", "2"), ("train@4.service", "4"), ("worker-3", None), ("rank-1234567", None)],
)
def test_the_number_of_a_party(party: str, number: str | None) -> None:
    found = process_names.PARTY.fullmatch(party)
    assert (found["label"] or found["instance"] if found else None) == number


@given(st.sampled_from(WORDS), st.integers(0, 999_999), st.sampled_from(["", "_", "-", "."]))
def test_a_name_in_a_file_is_read_back_and_is_no_host(word: str, number: int, separator: str) -> None:
    name = f"{word}{separator}{number}"
    found = process_names.FILE_RANK.search(f"logs/{name}.log")
    assert found and int(found["label"]) == number
    assert process_names.NOT_A_HOST.match(name)
    assert process_names.FILE_SUFFIX.sub("", f"nd1_{name}") == "nd1"


@pytest.mark.parametrize("unit", ["rank", "rank_1-of-", "global_rank_id", "[1,", "a@", "1@", "_1", "[rank 1 of "])
def test_long_names_take_linear_time(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    began = time.process_time()
    for pattern in (process_names.LABEL, process_names.PARTY, process_names.FILE_RANK, process_names.NOT_A_HOST,
                    process_names.FILE_SUFFIX):  # fmt: skip
        pattern.fullmatch(text)
        pattern.search(text)
    origin_of_line(text, ())
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", ["open-r1.log", "VLM-R1/train.log", "R1-V.log", "DeepSeek-R1-Distill.log"])
def test_names_of_models_and_programs_are_no_ranks(name: str) -> None:
    assert origin_of_file(name)[0].rank is None

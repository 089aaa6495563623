"""Counters on lines of all kinds."""

import pytest

from lockstep.doctor.logs.step_progress import RisingNumbers, parse_step, serves


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step 14 loss 0.5", (0, 14, 0, False)),
        ("iteration 3/10", (0, 3, 10, False)),
        (" 45%|####  | 45/100 [00:10<00:12, 4.5it/s]", (0, 45, 100, True)),
        ("Epoch 2:  45%|####  | 45/100 [00:10<00:12, 4.5it/s, v_num=0]", (2, 45, 100, True)),
        ("Epoch: [3][ 20/100]", (3, 20, 100, False)),
        ("Epoch 3 [ 20/100] loss 0.5", (3, 20, 100, False)),
        ("Test: [ 20/79]  Time 0.1", (0, 20, 79, False)),
        ("[00120] loss=0.28 lr=5e-2", (0, 120, 0, False)),
        ("[4711] exit code 1", None),
        ("epoch 3/5", (3, 0, 5, False)),
        ("[rank1] epoch 4 batch 11 loss 0.75", (4, 11, 0, False)),
        ("Epoch: 2, Step: 30/100, loss 0.5", (2, 30, 100, False)),
        ("{'loss': 1.9, 'grad_norm': 3.0, 'learning_rate': 1e-05, 'epoch': 0.12}", (0, 120000, 0, False)),
        ("{'loss': '1.9', 'num_tokens': '2.1e+05', 'epoch': '1.5'}", (1, 500000, 0, False)),
        ("{'loss': '1.9', 'epoch': '8.5e-05'}", (0, 85, 0, False)),
        ("{'loss': 1.9, " + "'rewards/a/mean': 0.25, " * 40 + "'epoch': 0.5}", (0, 500000, 0, False)),
        ("[INFO|trainer.py:2317] >>   Total optimization steps = 870", None),
        ("[INFO|trainer.py:2316] >>   Gradient Accumulation steps = 8", None),
        ("(WorkerDict pid=71) Total steps: 1005, num_warmup_steps: 286", None),
        ("nothing to count here", None),
        ("port 29500 is in use", None),
    ],
)
def test_parse_step(line: str, expected: tuple[int, int, int, bool] | None) -> None:
    assert parse_step(line) == expected


@pytest.mark.parametrize(
    ("line", "work"),
    [
        ('INFO:     10.4.0.2:50001 - "POST /v1/completions HTTP/1.1" 200 OK', True),
        ('INFO:     10.4.0.2:50001 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error', False),
        ('INFO:     10.4.0.2:50001 - "GET /health HTTP/1.1" 200 OK', False),
        ("Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 21.5 tokens/s, Running: 3 reqs", True),
        ("Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 3 reqs", False),
    ],
)
def test_work_of_a_server(line: str, work: bool) -> None:
    assert serves(line) is work


def test_a_number_that_grows_in_lines_of_one_form_is_a_counter() -> None:
    rising = RisingNumbers()
    found = [rising.count(f"label {at}/900 images, f1=0.{at} {'x' * (at % 3)}") for at in range(0, 480, 40)]
    assert found[:8] == [None] * 8 and found[8:] == [(0, at, 0, False) for at in range(320, 480, 40)]
    for form in ("still waiting for shard, {} s", "retry {} of 90", "Killing subprocess {}", "| {} NVIDIA L40S"):
        assert {rising.count(form.format(at)) for at in range(1, 40)} == {None}
    assert {rising.count(f"took {at % 2} s") for at in range(40)} == {None}

"""Who is named."""

from pathlib import Path

import pytest

from lockstep.doctor.explain import explain
from lockstep.watch.verdict import Verdict

from .jobs import raised, steps, write


def judged(folder: Path, **files: list[str]) -> Verdict:
    return explain([write(folder, **files)]).verdict


def names(verdict: Verdict) -> list[int | str]:
    return [each.rank if each.rank is not None else each.name for each in verdict.culprits]


def test_a_process_is_one_rank_with_and_without_its_number(tmp_path: Path) -> None:
    assertion = "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: block: [8,0,0], thread: [3,0,0] Assertion `srcIndex < srcSelectDimSize` failed."  # noqa: E501
    lines = [
        f"(Trainer pid=812, ip=10.0.0.8) {assertion}",
        "(Trainer pid=812, ip=10.0.0.8) [rank5]: RuntimeError: CUDA error: device-side assert triggered",
        "(Trainer pid=813, ip=10.0.0.9) [rank6]: RuntimeError: NCCL communicator was aborted on rank 6.",
    ]
    verdict = judged(tmp_path, job=lines)
    assert verdict.cause == "cuda_kernel_error" and names(verdict) == [5]


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("RuntimeError: CUDA error: invalid device ordinal", 1, "gpu_binding"),
        ("kernel: Out of memory: Killed process 771 (python) total-vm:9kB, anon-rss:5kB", -9, "host_oom"),
    ],
)
def test_the_number_on_the_host_is_the_rank_of_a_job_on_one(tmp_path: Path, fault: str, code: int, cause: str) -> None:
    lines = [
        fault,
        f"E0301 11:00:00.000 1 api.py:874] failed (exitcode: {code}) local_rank: 4 (pid: 771) of binary: py",
    ]
    verdict = judged(tmp_path, job=[*steps(0, 3), *lines])
    assert verdict.cause == cause and names(verdict) == [4]
    several = [f"{rank}: {line}" for rank in range(0, 64, 8) for line in steps(rank, 3)] + steps(63, 3)
    assert names(judged(tmp_path / "many", job=[*several, *lines])) != [4]


def test_a_service_that_a_message_names(tmp_path: Path) -> None:
    said = "requests.exceptions.ReadTimeout: HTTPConnectionPool(host='scorer-2', port=9000): Read timed out."
    verdict = judged(tmp_path, job=[*steps(0, 3), f"(Rewards pid=11) {said}"])
    assert verdict.cause == "remote_service_timeout" and names(verdict) == ["scorer-2"]
    hub = raised(3, said.replace("scorer-2", "huggingface.co"))
    assert names(judged(tmp_path / "hub", job=hub)) == [3]


def test_a_pod_that_ran_out_of_memory(tmp_path: Path) -> None:
    verdict = judged(tmp_path, pods=["NAME  READY  STATUS  RESTARTS", "llama-worker-3  0/1  OOMKilled  2  44m"])
    assert verdict.cause == "host_oom" and names(verdict) == ["llama-worker-3"]


def test_a_port_that_went_down_is_named_before_the_peer_that_does_not_answer(tmp_path: Path) -> None:
    lines = [
        "gn4:3301:3388 [2] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.14.7<51220> with "
        "status=12 opcode=0 len=0 vendor err 129 (Recv) hca mlx5_3",
    ]
    alone = judged(tmp_path / "alone", job=lines)
    assert alone.cause == "ib_rdma_fault" and names(alone) == ["10.0.14.7"]
    kernel = ["[60211.4] mlx5_core 0000:5e:00.0 mlx5_3: Port: 1 Link DOWN"]
    verdict = judged(tmp_path / "both", job=lines, **{"dmesg-gn4": kernel})
    assert verdict.cause == "ib_rdma_fault" and names(verdict) == ["mlx5_3"]
    assert verdict.culprits[0].host == "gn4"


def _call(*frames: tuple[str, str]) -> tuple[tuple[str, int, str, str], ...]:
    return tuple((file, 10, "f", source) for file, source in frames)


_TRAINER = "/venv/lib/python3.11/site-packages/transformers/trainer.py"
_MODULE = "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py"
_KIT = "/venv/lib/python3.11/site-packages/kit/make.py"


@pytest.mark.parametrize(
    ("last", "frames", "cause"),
    [
        (
            "TypeError: MyTrainer.compute_loss() got an unexpected keyword argument 'num_items'",
            _call(("train.py", "trainer.train()"), (_TRAINER, "loss = self.compute_loss(model, num_items=n)")),
            "version_mismatch",
        ),
        (
            "TypeError: Llama.forward() got an unexpected keyword argument 'num_items'",
            _call(("train.py", "trainer.train()"), (_TRAINER, "out = model(x, num_items=n)"),
                  (_MODULE, "return self._call_impl(*args, **kwargs)"),
                  (_MODULE, "return forward_call(*args, **kwargs)")),
            "version_mismatch",
        ),
        (
            "TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'max_prompts'",
            _call(("train.py", "config = GRPOConfig(max_prompts=3)")),
            "config_error",
        ),
        (
            "TypeError: EngineArgs.__init__() got an unexpected keyword argument 'tp_size'",
            _call(("train.py", "Engine(m, tp_size=2)"), (_KIT, "args = EngineArgs(")),
            "config_error",
        ),
        (
            "TypeError: build() got an unexpected keyword argument 'lrr'",
            _call(("train.py", "make(lrr=1)"), (_KIT, "return build(**kwargs)")),
            "rank_exception_masked",
        ),
    ],
)  # fmt: skip
def test_an_argument_that_a_library_gives_and_one_that_the_user_gives(
    tmp_path: Path, last: str, frames: tuple[tuple[str, int, str, str], ...], cause: str
) -> None:
    assert judged(tmp_path, job=raised(0, last, *frames)).cause == cause


def test_an_exception_of_a_rank_needs_no_heading(tmp_path: Path) -> None:
    """Loggers and those who post logs leave the frames out."""
    lines = ["[rank2]: FileNotFoundError: [Errno 2] No such file or directory: '/data/train.jsonl'"]
    verdict = judged(tmp_path / "file", job=[*steps(0, 5), *lines])
    assert verdict.cause == "storage_fault" and names(verdict) == [2]
    verdict = judged(tmp_path / "odd", job=[*steps(0, 5), "[rank3]: lib.shapes.OddError: these do not fit"])
    assert verdict.cause == "rank_exception_masked" and names(verdict) == [3]
    logged = "[2026-11-21 14:10:06] CRITICAL [lib.util:158, rank=6] Uncaught OddThing: these do not fit"
    verdict = judged(tmp_path / "logged", job=[*steps(0, 5), f"{logged}: Error: none"])
    assert names(verdict) == [6]

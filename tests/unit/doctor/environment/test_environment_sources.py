"""Environments are read from texts in all common notations."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.doctor.environment.environment_lint import ProcessEnvironment, lint_environments
from lockstep.doctor.environment.environment_sources import read_assignments

WANTED = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0,eth1"}


@pytest.mark.parametrize(
    "text",
    [
        "NCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME=eth0,eth1\n",
        "export NCCL_DEBUG=INFO; export NCCL_SOCKET_IFNAME='eth0,eth1'",
        'declare -x NCCL_DEBUG="INFO"\ndeclare -x NCCL_SOCKET_IFNAME="eth0,eth1"',
        "# NCCL_P2P_DISABLE=1\nexport NCCL_DEBUG=INFO # NCCL_ALGO=Ring\n\nexport NCCL_SOCKET_IFNAME=eth0,eth1",
        "docker run -e NCCL_DEBUG=INFO --env=NCCL_SOCKET_IFNAME=eth0,eth1 -e HOME image",
        "NCCL_DEBUG=INFO \\\n  NCCL_SOCKET_IFNAME=eth0,eth1 \\\n  torchrun --nnodes=2 train.py --lr=1e-5",
        "mpirun -x NCCL_DEBUG=INFO -x NCCL_SOCKET_IFNAME=eth0,eth1 python train.py",
        "ENV NCCL_DEBUG INFO\nENV NCCL_SOCKET_IFNAME=eth0,eth1",
        "setenv NCCL_DEBUG INFO\nsetenv NCCL_SOCKET_IFNAME eth0,eth1",
        "set -gx NCCL_DEBUG INFO\nset -x NCCL_SOCKET_IFNAME 'eth0,eth1'",
        'os.environ["NCCL_DEBUG"] = "INFO"\nos.environ.setdefault("NCCL_SOCKET_IFNAME", "eth0,eth1")',
        "export NCCL_ALGO=Ring\nunset NCCL_ALGO\nexport NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0,eth1",
        "HOME=/root\0NCCL_DEBUG=INFO\0NCCL_SOCKET_IFNAME=eth0,eth1\0",
        "env:\n  NCCL_DEBUG: INFO\n  NCCL_SOCKET_IFNAME: eth0,eth1\n",
        "spec:\n  containers:\n  - name: a\n    env:\n    - name: NCCL_DEBUG\n      value: INFO\n"
        "    - name: NCCL_SOCKET_IFNAME\n      value: 'eth0,eth1'\n    - name: IP\n      valueFrom: {fieldRef: x}\n",
        "services:\n  a:\n    environment:\n      - NCCL_DEBUG=INFO\n      - NCCL_SOCKET_IFNAME=eth0,eth1\n",
        json.dumps({"env_vars": WANTED}),
        json.dumps(WANTED),
        json.dumps([{"Config": {"Env": [f"{name}={value}" for name, value in WANTED.items()]}}]),
    ],
)
def test_forms(text: str) -> None:
    values = read_assignments(text)[""]
    assert {name: value for name, value in values.items() if name.startswith("NCCL_")} == WANTED


def test_hosts() -> None:
    both = {"a1": {"NCCL_DEBUG": "INFO"}, "b2": {"NCCL_DEBUG": "WARN"}}
    assert read_assignments(json.dumps(both)) == both
    assert read_assignments("a1: NCCL_DEBUG=INFO\nb2: export NCCL_DEBUG=WARN\n") == both


def test_slurms_list_and_what_is_quoted() -> None:
    assert read_assignments("#SBATCH --export=ALL,NCCL_DEBUG=INFO,X=1")[""] == {"NCCL_DEBUG": "INFO", "X": "1"}
    assert read_assignments('export A="a b # c" B=\'d "e"\' C=f\\ g D=$HOME/x')[""] == {
        "A": "a b # c", "B": 'd "e"', "C": "f g", "D": "$HOME/x",
    }  # fmt: skip


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    lint_environments([ProcessEnvironment(host, values) for host, values in read_assignments(text).items()])


@given(
    st.lists(
        st.sampled_from(["NCCL_DEBUG", "=", "INFO", "'", '"', "\n", " ", "\\", "{", "}", ":", "- ", "env", "#", "$"])
    )
)
def test_any_text_of_such_words_is_read(words: list[str]) -> None:
    lint_environments([ProcessEnvironment(host, values) for host, values in read_assignments("".join(words)).items()])


@given(
    st.recursive(
        st.none() | st.booleans() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_json_is_read(document: object) -> None:
    read_assignments(json.dumps(document))


@pytest.mark.parametrize(
    "text",
    [
        'A="' * 200_000,
        "x # " * 200_000,
        "' # " * 200_000,
        "env:\n" + "".join(f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x=1'}]\n" for i in range(12)),
        "NCCL_ALGO=" + "ring,tree" * 100_000,
        "NCCL_" + "1" * 100_000 + "=1",
        "NCCL_IB_HCA=" + "mlx5_1" * 100_000,
        "[" * 100_000,
        "a: " * 100_000,
    ],
    ids=range(9),
)
@pytest.mark.timeout(20)
def test_hostile_text_takes_no_time(text: str) -> None:
    lint_environments([ProcessEnvironment(host, values) for host, values in read_assignments(text).items()])

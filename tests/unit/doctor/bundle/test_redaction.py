"""Names are replaced consistently, and no secret survives."""

import re

import pytest

from lockstep.doctor.bundle.redaction import Redactor

_RANDOM = "Zq83kf02LmPwX71vBn45TyUc9a"
_HEX = "0123456789abcdef0123456789abcdef01234567"
SECRETS = {
    "hugging face": (f"token is hf_{_RANDOM}abcdef", f"hf_{_RANDOM}abcdef"),
    "openai": (f"OpenAI key sk-proj-{_RANDOM} was refused", _RANDOM),
    "github": (f"cloning with ghp_{_RANDOM}{_RANDOM[:10]}", _RANDOM),
    "github fine-grained": (f"github_pat_{_RANDOM}_{_RANDOM}", _RANDOM),
    "aws id": ("AWS AKIAIOSFODNN7EXAMPLE denied", "AKIAIOSFODNN7EXAMPLE"),
    "aws secret": ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI"),
    "bearer": (f"Authorization: Bearer {_RANDOM}", _RANDOM),
    "bearer in a dict": (f"headers={{'Authorization': 'Bearer {_RANDOM}'}}", _RANDOM),
    "basic": ("authorization: Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNzd29yZA"),
    "jwt": ("cookie eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N", "eyJzdWIi"),
    "url with password": ("pip install from https://ann:s3cr3t-pw@pypi.corp.example.net/simple", "s3cr3t-pw"),
    "url with token": (f"git clone https://oauth2:{_RANDOM}@gitlab.com/x.git", _RANDOM),
    "redis": ("redis://:hunter2hunter2@redis:6379/0", "hunter2hunter2"),
    "wandb variable": (f"WANDB_API_KEY={_HEX}", _HEX),
    "wandb login": (f"$ wandb login --relogin {_HEX}", _HEX),
    "wandb json": (f'{{"wandb_api_key": "{_HEX}", "steps": 10}}', _HEX),
    "netrc": (f"machine api.wandb.ai login user password {_HEX}", _HEX),
    "export": (f"export MY_SERVICE_TOKEN='{_RANDOM}'", _RANDOM),
    "option": (f"python train.py --api-key {_RANDOM} --lr 1e-4", _RANDOM),
    "option with equals": (f"python train.py --hf_token={_RANDOM} --lr 1e-4", _RANDOM),
    "quoted, with a comma and spaces": ("smtp_password: 'a, b; c d'", "b; c"),
    "JSON, with a comma": ('{"db_password": "x1,hunter2", "port": 5}', "hunter2"),
    "yaml password": ("  password: correct-horse-battery", "correct-horse-battery"),
    "repr": ("Namespace(lr=0.1, api_key='correct-horse-battery', steps=3)", "correct-horse-battery"),
    "slack": (f"https://hooks.slack.com xoxb-1234567890-{_RANDOM}", _RANDOM),
    "signed url": (f"GET https://store.example.net/x?X-Amz-Signature=abc&token={_RANDOM}", _RANDOM),
    "gitlab": (f"glpat-{_RANDOM}", _RANDOM),
    "google": (f"key AIza{_RANDOM}{_RANDOM[:9]}", _RANDOM),
    "ssh public key": (f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5{_RANDOM} ann@box", _RANDOM),
    "private key": (
        f"-----BEGIN RSA PRIVATE KEY-----\nb3BlbnNzaC1rZXk{_RANDOM}\n{_RANDOM}AAAA\n-----END RSA PRIVATE KEY-----",
        _RANDOM,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("around", ["{}", "[rank3]: 2026-11-21 14:10:00 INFO got {} here", '"{}",'])
def test_no_secret_survives(name: str, around: str) -> None:
    text, secret = SECRETS[name]
    redactor = Redactor()
    line = around.format(text)
    redactor.learn(line)
    redacted = redactor.text(line)
    assert secret not in redacted and redactor.secrets >= 1
    assert redacted.count("\n") == line.count("\n"), "line numbers stay"


@pytest.mark.parametrize(
    "line",
    [
        "step 10 loss 0.5 tokens 4096 max_tokens=2048 eos_token_id=151643 pad_token: <|endoftext|> num_tokens: 128",
        "[rank3]:[E1121 14:30:00 ProcessGroupNCCL.cpp:629] Timeout(ms)=600000) ran for 600021 milliseconds",
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        "torch==2.6.0 nvidia-cudnn-cu12==9.1.0.70 NCCL version 2.21.5.1 driver 535.104.5.12",
        'File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce',
        "http://127.0.0.1:29500 0.0.0.0 ::1 172.17.0.1 https://huggingface.co/docs https://pytorch.org/docs",
        '"PWD": "[hidden]", "WANDB_API_KEY": "[hidden]"',
        "srun: error: node-3: task 7: Exited with exit code 1",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has 79.15 GiB",
    ],
)
def test_lines_that_name_nobody_stay(line: str) -> None:
    redactor = Redactor()
    redactor.learn(line)
    assert redactor.text(line) == line


def test_names_get_the_same_substitute_everywhere() -> None:
    redactor = Redactor(hosts=("dgx-a17.lab.corp", "dgx-a18"), runs=("grpo-secret-project",))
    lines = [
        "dgx-a17:1234:1290 [0] NCCL INFO Bootstrap : Using eth0:10.31.7.12<0>",
        "dgx-a18:77:90 [1] NCCL INFO connected to 10.31.7.12, from 10.31.9.1 and 192.168.5.5",
        'File "/home/anna.schmidt/proj/train.py", line 3',
        "USER=anna.schmidt mails anna.schmidt@corp-mail.de, run_name=grpo-secret-project",
        "ssh anna.schmidt@dgx-a17.lab.corp",
    ]
    for line in lines:
        redactor.learn(line)
    text = "\n".join(map(redactor.text, lines))
    for name in ("dgx", "anna", "schmidt", "corp", "10.31", "192.168.5.5", "secret-project"):
        assert name not in text, (name, text)
    assert "machine-1:1234:1290 [0] NCCL INFO" in text and "machine-2:77:90 [1]" in text
    assert text.count("10.0.0.1") == 2 and "10.0.0.2" in text and "192.168.0.1" in text
    assert 'File "/home/user-1/proj/train.py", line 3' in text and "USER=user-1" in text
    assert "ssh user-1@machine-1.example.com" in text and re.search(r"mails user-1@\S*example\.com", text)


def test_addresses_keep_their_networks_and_stay_private_or_public() -> None:
    redactor = Redactor()
    found = redactor.text("10.1.2.3 10.1.9.9 10.2.0.1 8.8.8.8 8.8.4.4 172.20.1.1 fe80::1ff:fe23:4567:890a 2607:f8b0::1")
    first, same, other, public, public2, private, link, six = found.split()
    assert first.split(".")[:2] == same.split(".")[:2] != other.split(".")[:2]
    assert public.startswith("203.0.113.") and public2.startswith("203.0.113.") and private.startswith("172.")
    assert link.startswith("fe80::") and six.startswith("2001:db8::")


def test_the_hosts_of_an_incident_go_also_where_they_are_keys() -> None:
    capture, machine = '{"host":"gpubox","offset_ns":0}', '{\n "gpubox": {\n  "node": "gpubox"\n }\n}'
    redactor = Redactor()
    redactor.learn(machine)
    redactor.learn(capture)
    assert redactor.text(capture) == '{"host":"machine-1","offset_ns":0}'
    assert "gpubox" not in redactor.text(machine)


@pytest.mark.parametrize("run", ["2", "policy", "2026-11-27", "GRPO", "a"])
def test_the_name_of_a_run_that_could_be_any_word_changes_no_log(run: str) -> None:
    line = "2026-11-27 10:00:02 policy-0 grpo GRPO a rank 2 of 8 died in step 2"
    assert Redactor((), (run,)).text(line) == line
    assert Redactor((), (run, "grpo-7b-math")).text("saved grpo-7b-math") == "saved run-name-1"

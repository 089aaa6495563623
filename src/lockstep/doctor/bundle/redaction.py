"""Replaces what tells who and where in the texts of a job: hosts, addresses, users, home paths, run names, secrets.

The same name gets the same substitute in all files. Numbers, ranks, times and the forms of lines stay, so that a
redacted job gets the verdict of the original.
"""

import re
from collections.abc import Callable, Iterable

from lockstep.base.secrets import HIDDEN, is_secret_name, redact_text
from lockstep.doctor.bundle.cluster_names import cluster_hosts, listed_users, node_lists, pod_groups, without_accounts
from lockstep.doctor.bundle.private_paths import PrivatePaths

_GENERIC_USERS = frozenset((
    "root", "user", "users", "ubuntu", "admin", "ray", "runner", "jovyan", "vscode", "ec2-user", "centos", "docker",
    "nobody", "vllm", "app", "u", "me", "home", "test", "mpiuser", "work", "shared", "data", "tmp", "default",
    "none", "null", "public", "git", "hf", "oauth2", "daemon", "systemd", "slurm", "munge", "wheel", "staff", "dialout",
))  # fmt: skip
"""Accounts of images and examples, which name nobody."""
_GENERIC_HOSTS = frozenset((
    "localhost", "localhost.localdomain", "head", "master", "worker", "driver", "node", "host", "trainer", "rank",
    "stdin", "kernel", "vm", "controller", "engine", "learner", "actor", "rollout", "server", "client", "gpu",
    "cuda", "api", "www", "git", "mail", "docs", "db", "redis", "proxy", "registry", "data", "cdn", "hub", "auth",
    "login", "storage", "metrics", "grafana", "monitor", "internal", "cluster", "default", "svc", "ray", "vllm",
    "reward", "judge",
))  # fmt: skip
_GENERIC_RUNS = frozenset((
    "sft", "preference", "reward", "rewards", "ppo", "grpo", "dpo", "kto", "orpo", "policy", "actor", "reference",
    "critic", "engine", "rollout", "scorer", "environment", "courier", "controller", "supervisor", "agent", "rank",
    "node", "host", "worker", "train", "trainer", "training", "eval", "test", "tests", "run", "runs", "job", "jobs",
    "debug", "main", "demo", "logs", "incidents", "step", "steps", "error", "default", "none", "null", "true", "false",
))  # fmt: skip
"""Names of runs that are also words of logs and of file names: replacing these would change what the logs say."""
_PUBLIC_DOMAINS = (
    "pytorch.org", "python.org", "github.com", "githubusercontent.com", "huggingface.co", "hf.co", "nvidia.com",
    "vllm.ai", "ray.io", "readthedocs.io", "readthedocs.org", "pypi.org", "pythonhosted.org", "wandb.ai",
    "anaconda.com", "docker.io", "stackoverflow.com", "deepspeed.ai", "schedmd.com", "open-mpi.org",
    "kubernetes.io", "example.com", "w3.org", "comet.com", "mlflow.org", "microsoft.com", "google.com",
    "googleapis.com", "amazonaws.com", "slack.com", "discord.com", "gitlab.com", "nvcr.io", "ghcr.io",
    "quay.io", "svc.cluster.local", "modelscope.cn", "gnu.org", "kernel.org",
)  # fmt: skip

_MULTILINE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]*-----[^-]{0,20000}-----END [A-Z0-9 ]*-----")
_SSH_KEY = re.compile(r"\b(?:ssh-(?:rsa|ed25519|dss)|ecdsa-sha2-\w+) [A-Za-z0-9+/=]{20,}")
_AUTHORIZATION = re.compile(r"(?i)\b((?:bearer|basic|token|apikey|api-key)[ :=]+)(?!\[hidden\])[A-Za-z0-9._~+/=-]{12,}")
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|x-api-key|x-auth-token|set-cookie|cookie)(['\"]?\s*[:=]\s*['\"]?)[^'\"\r\n]+"
)
_ASSIGNMENT = re.compile(
    r"(?:(?P<name>[A-Za-z_][\w.-]{1,63})(?P<between>['\"]?\s{0,2}[:=]\s{0,2})"
    r"|(?<=--)(?P<option>[A-Za-z][\w.-]{1,63})(?P<space>\s{1,2}))(?P<quote>['\"]?)"
    r"(?P<value>(?<=')[^'\r\n]{4,4000}(?=')|(?<=\")[^\"\r\n]{4,4000}(?=\")|[^\s'\",;)}\]]{4,4000})"
)
_LOGIN = re.compile(
    r"(?i)\b((?:wandb|huggingface-cli|hf auth|docker|gh auth) login (?:[\w=.@/-]+ ){0,4}?(?:--?\w[\w-]*[ =])?)"
    r"[\w.-]{16,}"
)
_NETRC = re.compile(r"(?i)\b(machine \S+ login \S+ password )\S+")
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@'\"]+@")
_HEX_KEY = re.compile(r"(?i)((?:key|token|secret|wandb)\W[^\n]{0,40}?)\b[0-9a-f]{40}\b")
_SECRET_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{12,}|gh[pousr]_[A-Za-z0-9]{12,}|github_pat_\w{12,}|(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|eyJ[\w-]{4,}\.[\w-]{4,}(?:\.[\w-]{4,})?|AIza[\w-]{20,}|xox[abeoprs]-[\w-]{8,}|glpat-[\w-]{10,}|wandb_v1_\w{8,})"
)
_SIGNED = re.compile(
    r"(?i)((?:[?&;]|%26)(?:x-(?:amz|goog|oss|cos|tos)-(?:signature|security-token|credential)|sig|signature|signedheaders"
    r"|awsaccesskeyid|ossaccesskeyid|q-signature|q-ak)(?:=|%3D))(?!\[hidden)[^\s&'\"<>]+"
)
"""What opens a file of a cloud's store to everybody who has the link."""
_WEBHOOK = re.compile(  # its first letters first: they leave most of a text out
    r"(?i)(?=[hdwoqa])((?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
    r"|webhook\.office\.com"
    r"|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v2/hook|qyapi\.weixin\.qq\.com/cgi-bin/webhook/send"
    r"|oapi\.dingtalk\.com/robot/send|api\.telegram\.org)[/?])[^\s'\"<>]+"
)
_MAIL = re.compile(r"(?<![\w.+-])(?P<user>[\w.+-]{1,64})@(?P<domain>[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+)\b")
_USER_AT = re.compile(r"(?<![\w.@/-])(?P<user>[a-z_][\w.-]{1,31})@(?P<host>[A-Za-z0-9][\w.-]*)")
_HOME = re.compile(
    r"(?<![\w.-])(?:/[\w.-]+){0,6}?(?:/(?:home|Users|users|user|u)|(?<![\w.-])/(?:scratch|fsx))/"
    r"(?P<user>[A-Za-z0-9._-]{1,64})(?=/|\b)"
    r"|(?i:\b[a-z]:\\{1,2}users\\{1,2})(?P<windows>[\w.-]{2,64})"
)
_USER_SETTING = re.compile(
    r"(?:\b(?:USER|LOGNAME|USERNAME|SUDO_USER|SLURM_JOB_USER)['\"]?\s?[=:]\s?['\"]?|\buser=|\bUserId="
    r"|\b[Ll]ogged in as:? )"
    r"(?P<user>[A-Za-z_][\w.-]{1,63})"
)
_RUN_SETTING = re.compile(
    r"(?:\b(?:run_name|experiment_name|exp_name|project_name|wandb_project|wandb_run_name|wandb_entity|WANDB_PROJECT"
    r"|WANDB_NAME|WANDB_ENTITY"
    r"|WANDB_RUN_GROUP|job_name|JobName|SLURM_JOB_NAME|MLFLOW_EXPERIMENT_NAME)['\"]?\s?[=:]\s?['\"]?"
    r"|--(?:run[_-]name|experiment[_-]name|exp[_-]name|wandb[_-]project|project[_-]name|job-name)[ =]['\"]?"
    r"|\bSyncing run |\bView project at \S*?wandb\.ai/|wandb: .{0,20}\brun )(?P<name>[A-Za-z][\w.-]{2,80})"
)
_TRACKER_PATH = re.compile(r"(?<=wandb\.ai/)(?P<entity>[\w.-]+)/(?P<project>[\w.-]+)(?:/runs/(?P<run>[\w-]+))?")
_ADDRESS = re.compile(r"(?<![\w.])(?<!==)(?P<a>\d{1,3})\.(?P<b>\d{1,3})\.(?P<c>\d{1,3})\.(?P<d>\d{1,3})(?![\w]|\.\d)")
_VERSION_BEFORE = re.compile(r"(?i)(?:version|driver|cudnn|nccl|cublas|==|>=|<=|~=|\bv)[\s:=v-]{0,3}$")
_ADDRESS6 = re.compile(
    r"(?<![\w:.])(?=[0-9a-fA-F:]*::|(?:[0-9a-fA-F]{1,4}:){7})(?:[0-9a-fA-F]{1,4})?(?::{1,2}[0-9a-fA-F]{1,4}){1,7}"
    r"(?![\w:]|\.\d)"
)
_MAC = re.compile(r"(?i)(?<![\w:-])(?:(?:[0-9a-f]{2}:){5,19}|(?:[0-9a-f]{2}-){5})[0-9a-f]{2}(?![\w:-])")
"""Of Ethernet, and of InfiniBand with 20 bytes."""
_GUID = re.compile(
    r"(?i)(?<![\w:])(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![\w:.])|(?<=guid )0x[0-9a-f]{16}|(?<=guid[:=])0x[0-9a-f]{16}"
)
_GPU_ID = re.compile(r"\b(?P<kind>GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_SERIAL = re.compile(r"(?i)(\bserial(?: number| no\.?)?\s*[:=]?\s+)(?=[\w-]*\d{4})[\w-]{8,}")
_DOMAIN = re.compile(
    r"(?<![\w@./-])(?=[\w.-]*[a-z])[A-Za-z0-9][A-Za-z0-9-]*(?:\.[A-Za-z0-9][A-Za-z0-9-]*){0,6}"
    r"\.(?:com|net|org|edu|gov|io|ai|cn|de|fr|uk|jp|local|internal|intra|intranet|lan|corp|cluster|cloud|svc)"
    r"(?:\.[a-z]{2,10})*(?![\w(])(?!\.\w)"
)
_URL_HOST = re.compile(r"(?<=://)(?!\d)(?P<host>[A-Za-z0-9][\w.-]*)")
_CLOUD_HOST = re.compile(r"\bip-\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3}(?:\.[\w.-]+)?")
_LAUNCHER_HOST = re.compile(
    r"(?:^|(?<=\s))(?:host|hostname|HOSTNAME|nodename|SLURMD_NODENAME|MASTER_ADDR|HOST|nodelist|node)\s*[=:]\s*['\"]?"
    r"(?P<host>[A-Za-z][\w.-]{2,62})"
)
_JSON_HOST = re.compile(r'"(?:host|hostname|nodename)": ?"(?P<host>[A-Za-z][\w.-]{1,252})"')
"""As in the captures, verdicts and processes of an incident."""


class Redactor:
    """Replaces names in texts consistently.

    A host becomes `machine-1`, a run `run-name-1`: names from which nothing reads the number of a node or an attempt.

    Args:
        hosts: Names of hosts that are known from the job. Others are found by their form.
        runs: Names of runs that are known.
    """

    def __init__(self, hosts: Iterable[str] = (), runs: Iterable[str] = ()) -> None:
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._networks: dict[tuple[int, int], tuple[str, int]] = {}
        self.secrets = 0
        """How many secrets were hidden."""
        for host in sorted(set(hosts)):
            self._add_host(host)
        for name in sorted(set(runs)):
            self._add_run(name)
        self._pattern: re.Pattern[str] | None = None
        self._paths = PrivatePaths()

    @property
    def names(self) -> dict[str, str]:
        """The substitutes that were given, by name."""
        return {**self._paths.names, **self._names}

    def learn(self, text: str) -> None:
        """Finds the users, hosts and runs that a text names, so that they are replaced in all texts."""
        for found in _HOME.finditer(text):
            self._add_user(found["user"] or found["windows"])
        for user in listed_users(text):
            self._add_user(user)
        for found in _USER_SETTING.finditer(text):
            self._add_user(found["user"])
        for found in _USER_AT.finditer(text):
            if not re.search(r"\.(?:com|org|edu|net|io|ai)$", found["host"]):
                self._add_user(found["user"])
                self._add_host(found["host"])
        for found in _RUN_SETTING.finditer(text):
            self._add_run(found["name"])
        for found in _TRACKER_PATH.finditer(text):
            self._add(found["entity"], "team")
            self._add(found["project"], "project")
            if found["run"]:
                self._add_run(found["run"])
        for pattern in (_LAUNCHER_HOST, _URL_HOST):
            for found in pattern.finditer(text):
                if re.search(r"\d|\.", found["host"]):
                    self._add_host(found["host"])
        for found in _JSON_HOST.finditer(text):
            self._add_host(found["host"])
        for _, nodes in node_lists(text):
            for node in nodes:
                self._add_host(node)
        for host in cluster_hosts(text):
            self._add_host(host)
        for group in pod_groups(text):
            self._add_run(group)
        for pattern in (_CLOUD_HOST, _DOMAIN):
            for found in pattern.finditer(text):
                self._add_host(found[0])

    def text(self, text: str) -> str:
        """Returns a text without names, addresses and secrets."""
        text = without_accounts(self._without_secrets(text))
        text = _MAIL.sub(self._mail, text)
        for found, nodes in reversed(list(node_lists(text))):
            substitutes = ",".join(self._names.get(node, node) for node in nodes)
            text = text[: found.start()] + substitutes + text[found.end() :]
        text = self._known().sub(lambda found: self._names[found[0]], text)
        text = self._paths.text(text)
        text = _ADDRESS.sub(self._address, text)
        text = _GPU_ID.sub(
            lambda found: self._numbered(
                found[0], "gpu", found["kind"] + "-00000000-0000-0000-0000-00000000{0:02x}{1:02x}"
            ),
            text,
        )
        text = _SERIAL.sub(r"\g<1>" + HIDDEN, text)
        text = _GUID.sub(lambda found: self._numbered(found[0].lower(), "guid", "0000:0000:0000:{0:02x}{1:02x}"), text)
        text = _MAC.sub(lambda found: self._numbered(found[0].lower(), "mac", "02:00:00:00:{0:02x}:{1:02x}"), text)
        return _ADDRESS6.sub(self._address6, text)

    def _without_secrets(self, text: str) -> str:
        text = self._hide(_MULTILINE_KEY, text)
        text = self._hide(_SSH_KEY, text)
        text = self._hide(_LOGIN, text)
        text = self._hide(_NETRC, text)
        text = self._hide(_HEADER, text, lambda found: f"{found[1]}{found[2]}{HIDDEN}")
        text = self._hide(_AUTHORIZATION, text)
        text = self._hide(_WEBHOOK, text)
        text = self._hide(_SIGNED, text)
        text = self._hide(_CREDENTIALS, text, lambda found: f"{HIDDEN}@")
        text = self._hide(_HEX_KEY, text)
        text = _ASSIGNMENT.sub(self._assignment, text)
        text = self._hide(_SECRET_FORMS, text, lambda found: HIDDEN)
        hidden = redact_text(text)
        self.secrets += hidden.count(HIDDEN) - text.count(HIDDEN)
        return hidden

    def _hide(self, pattern: re.Pattern[str], text: str, replaced: Callable[[re.Match[str]], str] | None = None) -> str:
        """Hides what a pattern matches: all, or all but its first group. Line breaks stay."""

        def hide(found: re.Match[str]) -> str:
            self.secrets += 1
            if replaced is not None:
                return replaced(found)
            return (found[1] if pattern.groups else "") + HIDDEN + "\n" * found[0].count("\n")

        return pattern.sub(hide, text)

    def _assignment(self, found: re.Match[str]) -> str:
        """Hides the value of a variable, key or option whose name says that it is a secret."""
        name, between = found["name"] or found["option"], found["between"] or found["space"]
        value = found["value"]
        hidden = value.startswith(HIDDEN[:-1])
        if not is_secret_name(name.replace("-", "_")) or value.lower() in _PLAIN_VALUES or hidden:
            return found[0]
        if re.fullmatch(r"[\d.]+", value) or value.startswith(("-", "<|")):
            return found[0]
        if name in ("PWD", "OLDPWD") and value.startswith("/"):  # the shell's working folder
            return found[0]
        self.secrets += 1
        return f"{name}{between}{found['quote']}{HIDDEN}"

    def _mail(self, found: re.Match[str]) -> str:
        user, domain = found["user"], found["domain"]
        if user in _GENERIC_USERS and domain in self._names:
            return f"{user}@{self._names[domain]}"
        if domain in _PUBLIC_DOMAINS and user in _GENERIC_USERS:
            return found[0]
        return f"{self._add(user, 'user')}@{self._names.get(domain, 'example.com')}"

    def _known(self) -> re.Pattern[str]:
        """What matches the known names, longest first, as whole words."""
        if self._pattern is None:
            names = sorted(self._names, key=len, reverse=True)
            inside = "|".join(re.escape(each) for each in names) or r"(?!)"
            self._pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{inside})(?![A-Za-z0-9])")
        return self._pattern

    def _add_user(self, name: str) -> None:
        if name.lower() not in _GENERIC_USERS and len(name) > 1 and not name.isdigit():
            self._add(name, "user")

    def _add_host(self, name: str) -> None:
        name = name.rstrip(".-:")
        plain = name.lower()
        if plain in _GENERIC_HOSTS or plain.endswith(_PUBLIC_DOMAINS) or len(name) < 2 or _ADDRESS.fullmatch(name):
            return
        if re.fullmatch(r"[\d.:]+|(?:rank|node|worker|gpu|trainer)?[-_]?\d+|machine-\d+(?:\.example\.com)?", plain):
            return
        short, dot, _ = name.partition(".")
        if not dot:
            self._add(name, "machine")
        elif name not in self._names:
            if short in self._names or self._is_distinct(short):
                own = self._names.get(short) or self._add(short, "machine")
            else:  # `x.corp.com` says nothing about the word `x`
                own = self._next("machine")
            self._set(name, f"{own}.example.com")

    @staticmethod
    def _is_distinct(short: str) -> bool:
        """Whether the first part of a host's name names it also alone."""
        return len(short) > 2 and short.lower() not in _GENERIC_HOSTS | _GENERIC_RUNS | _GENERIC_USERS

    def _add_run(self, name: str) -> None:
        """Adds the name of a run, unless it could be any number, date or word of a log."""
        if len(name) > 2 and re.search(r"[A-Za-z]", name) and name.lower() not in _GENERIC_RUNS:
            self._add(name, "run-name")

    def _add(self, name: str, kind: str) -> str:
        """Returns the substitute of a name, a new one if it has none."""
        if name not in self._names:
            self._set(name, self._next(kind))
        return self._names[name]

    def _next(self, kind: str) -> str:
        """Returns a substitute that no name has."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}-{self._counts[kind]}"

    def _set(self, name: str, substitute: str) -> None:
        self._names[name], self._pattern = substitute, None

    def _numbered(self, name: str, kind: str, form: str) -> str:
        if name not in self._names:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._names[name] = form.format(number >> 8, number & 255)
        return self._names[name]

    def _address(self, found: re.Match[str]) -> str:
        """Replaces an address. Addresses of one network stay in one, and private ones private; loopback, wildcards and
        the bridges of containers say nothing about anybody."""
        a, b, c, d = (int(found[part]) for part in "abcd")
        known = found[0]
        if max(a, b, c, d) > 255 or _VERSION_BEFORE.search(found.string[max(0, found.start() - 24) : found.start()]):
            return known
        if a in (0, 127, 255) or (a == 172 and b in (17, 18)) or known == "169.254.169.254" or a >= 224:
            return known
        if known not in self._names:
            private = "10" if a == 10 else "192.168" if (a, b) == (192, 168) else "172" if a == 172 and b < 32 else ""
            prefix, third = self._network(private, (a, b))
            number = self._counts[prefix] = self._counts.get(prefix, 0) + 1
            self._names[known] = f"{prefix}.{third + number // 250}.{number % 250 or 250}"
        return self._names[known]

    def _network(self, private: str, own: tuple[int, int]) -> tuple[str, int]:
        """Returns the first two numbers of the substitutes for a network of two numbers, and the least third one."""
        if own not in self._networks:
            kind = f"network {private}"
            number = self._counts[kind] = self._counts.get(kind, -1) + 1
            inside = {"10": f"10.{number}", "172": f"172.{19 + number % 12}", "192.168": "192.168"}.get(private)
            documentation = _DOCUMENTATION[number] if number < len(_DOCUMENTATION) else ("198.18", number)
            self._networks[own] = (inside, 0) if inside else documentation
        return self._networks[own]

    def _address6(self, found: re.Match[str]) -> str:
        text = found[0]
        if text in ("::", "::1") or text.lower().startswith("2001:db8"):
            return text
        link = "fe80::{0:x}{1:02x}" if text.lower().startswith("fe80") else "2001:db8::{0:x}{1:02x}"
        return self._numbered(text, "address6", link)


_DOCUMENTATION = (("203.0", 113), ("198.51", 100), ("192.0", 2))
"""Networks for examples (RFC 5737)."""
_PLAIN_VALUES = ("none", "null", "true", "false", "unset", "***", "xxx", "<token>", "redacted", "[hidden]")

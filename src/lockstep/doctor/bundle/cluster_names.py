"""Finds the names that schedulers and Kubernetes print: node lists, hosts with ports, pods, namespaces, accounts."""

import re
from collections.abc import Iterator

_MOST_NODES = 16384
_NODE_LIST = re.compile(
    r"(?<![A-Za-z0-9_.-])(?P<prefix>[A-Za-z][A-Za-z0-9_.-]{0,80}?)"
    r"\[(?P<ranges>\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\](?P<suffix>[a-z-]{0,20})"
)
_LIST_BEFORE = re.compile(r"(?i)node_?list['\"]?\s*[=:(]\s*['\"]?(?:[\w.-]+(?:\[[\d,-]+\])?,)*$|\bnodes?[ =:]+$")
_HOST_SETTING = re.compile(
    r"(?:\b\w*NODE_?LIST|\bNodeList|\bReqNodeList|\bBatchHost|\bNodeName|\bSLURM_TOPOLOGY_ADDR|\bSLURM_SUBMIT_HOST"
    r"|\bHOSTNAME|\bALLOCATED_NODES)['\"]?\s*[=:]\s*['\"]?(?P<hosts>[A-Za-z][\w.-]+(?:,[A-Za-z][\w.-]+)*)(?![\w.,-]*\[)"
)
_HOST_AND_PORT = re.compile(  # its first letters first, here and below: they leave most of a text out
    r"(?i)(?=[:@tfpwaoh])(?:://(?:[^\s/@]{1,200}@)?|@|\b(?:to|from|peer|with|at|on|host)[ :=(]+)"
    r"\[?(?P<host>[a-z][\w.-]*\w)\]?:(?=\d{4,5}(?![\w:]))"
)
_SOURCE_FILE = re.compile(r"(?i).*\.(?:py|pyx|cc|cpp|cu|cuh|c|h|hpp|go|rs|js|so|sh|log|txt|yaml|json)")
_POD = re.compile(
    r"(?=[pnsdrjkm])(?:\b(?:pods?|namespaces?|statefulset|deployment|pytorchjob|rayjob|raycluster|jobset|podname|pod_name"
    r"|kubernetes pod|mpijob|podgroup)(?:\.[a-z.]+)?['\"]?\s?(?:[/:=]\s?|\s)['\"]?)"
    r"(?P<name>[a-z0-9](?:[a-z0-9.-]{0,200}[a-z0-9])?)",
    re.IGNORECASE,
)
_NODE_OF_POD = re.compile(r"(?:\bNode:\s+|\bnodeName['\"]?: ['\"]?|\bassigned \S+ to )(?P<host>[a-z][\w.-]+)")
_POD_END = re.compile(
    r"-(?:master|worker|launcher|head|trainer|learner|rollout|engine|server|driver|node|rank|actor|replica)(?:-\d+)*"
    r"|-[0-9a-f]{6,10}-[0-9a-z]{5}|-(?=[0-9a-z]*\d)[0-9a-z]{5}|(?:-\d+)+"
)
_ACCOUNT = re.compile(
    r"\b(?P<setting>Account|GroupId|Partition|QOS|WCKey|Reservation|Licenses)=(?P<name>[A-Za-z][\w.-]*)"
)
_LISTED_FILE = re.compile(r"(?m)^[-dlspbc][rwxsStT-]{9}[.+@]? +\d+ +(?P<user>[\w.-]+) +(?P<group>[\w.-]+) +\d")
_LISTED_PROCESS = re.compile(r"(?m)^(?P<user>[a-z_][\w.+-]*) +\d+ +\d{1,4}\.\d +\d{1,3}\.\d +\d+ +\d+ ")
_CLOUD_ACCOUNT = re.compile(
    r"\barn:aws[\w-]*:[\w-]+:[\w-]*:(?P<arn>\d{12})(?P<rest>:[\w/.:+=@-]+)?|\b(?P<registry>\d{12})(?=\.dkr\.ecr)"
)


def expand_node_list(prefix: str, ranges: str, suffix: str = "") -> list[str]:
    """Returns the names of a list such as `gpu-[014-017,021]`, at most 16,384; none of one that goes backwards."""
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low or len(found) + high - low >= _MOST_NODES:
            return []
        found += [f"{prefix}{number:0{len(first)}d}{suffix}" for number in range(low, high + 1)]
    return found


def node_lists(text: str) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Yields the lists of nodes in a text with their names: after a word that announces one, or with a leading zero."""
    for found in _NODE_LIST.finditer(text) if "[" in text else ():
        announced = _LIST_BEFORE.search(found.string, max(0, found.start() - 400), found.start())
        if announced or re.match(r"0\d", found["ranges"]):
            names = expand_node_list(found["prefix"], found["ranges"], found["suffix"])
            if names:
                yield found, names


def cluster_hosts(text: str) -> Iterator[str]:
    """Yields hosts that a text names by a setting of a scheduler, with a port, or as the node of a pod."""
    for found in _HOST_SETTING.finditer(text):
        yield from found["hosts"].split(",")
    for found in _HOST_AND_PORT.finditer(text):
        if re.search(r"\d|[.-]", found["host"]) and not _SOURCE_FILE.fullmatch(found["host"]):
            yield found["host"]
    for found in _NODE_OF_POD.finditer(text):
        if re.search(r"\d", found["host"]):
            yield found["host"]


def pod_groups(text: str) -> Iterator[str]:
    """Yields what the pods and namespaces of a text are named after: `titan-sft` of `titan-sft-worker-3`."""
    for found in _POD.finditer(text):
        name = found["name"]
        shorter = name
        while end := re.search(rf"(?:{_POD_END.pattern})$", shorter):
            shorter = shorter[: end.start()]
        if "-" in name and len(shorter) > 2:
            yield shorter


def listed_users(text: str) -> Iterator[str]:
    """Yields the owners in the output of `ls -l` and `ps aux`."""
    for pattern in (_LISTED_FILE, _LISTED_PROCESS):
        for found in pattern.finditer(text):
            yield from found.groups()


def without_accounts(text: str) -> str:
    """Returns a text without accounts, groups and partitions of a scheduler, and accounts of a cloud."""
    text = _ACCOUNT.sub(lambda found: f"{found['setting']}=[hidden]", text)
    return _CLOUD_ACCOUNT.sub(
        lambda found: "000000000000" if found["registry"] else f"{found[0].split(found['arn'])[0]}[hidden]", text
    )

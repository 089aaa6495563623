"""A launcher that starts nothing: it says what a person is to start on each host."""

from collections.abc import Callable, Mapping, Sequence

from lockstep.doctor.check.protocol import TOKEN_VARIABLE, Launcher


def join_command(head: str, port: int, name: str) -> str:
    """What starts a probe on a host; the token comes from the environment, or is asked for."""
    where = f"[{head}]:{port}" if ":" in head else f"{head}:{port}"
    return f"lockstep check --join {where} --name {name}"


class Printed:
    """Has people start the probes.

    Args:
        say: shows a line to whoever started the check.
        show_token: whether the token is said as well (not where it came from the environment).
    """

    def __init__(self, hosts: Sequence[str], say: Callable[[str], None], show_token: bool) -> None:
        self._hosts, self._say, self._show_token = tuple(hosts), say, show_token

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._hosts

    @property
    def addresses(self) -> Mapping[str, str]:
        return {}

    def start(self, head: str, port: int, token: str) -> None:
        for name in self._hosts:
            self._say(f"on {name} run: {join_command(head, port, name)}")
        if self._hosts and self._show_token:
            self._say(f"it asks for this token (or finds it in {TOKEN_VARIABLE}): {token}")

    def failed(self) -> Mapping[str, str]:
        return {}

    def stop(self) -> None:
        return None


class Several:
    """Launchers of different kinds as one."""

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self.parts = tuple(launchers)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(host for each in self.parts for host in each.hosts)

    @property
    def addresses(self) -> Mapping[str, str]:
        return {host: address for each in self.parts for host, address in each.addresses.items()}

    def start(self, head: str, port: int, token: str) -> None:
        for each in self.parts:
            each.start(head, port, token)

    def failed(self) -> Mapping[str, str]:
        return {host: why for each in self.parts for host, why in each.failed().items()}

    def stop(self) -> None:
        for each in self.parts:
            each.stop()

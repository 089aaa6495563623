"""A token that turns Ray's authentication on at its head alone."""

from pathlib import Path

from lockstep.doctor.check.facts.host_facts import RayToken
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.facts.network_facts import gather_ray_token
from lockstep.doctor.check.rules.network_rules import judge_ray_token

RAY = HostRequirements(several=True, packages=("python", "ray"))


def test_where_a_token_is_found_without_being_read(tmp_path: Path) -> None:
    assert gather_ray_token({}, tmp_path) == RayToken()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("secret")
    assert gather_ray_token({"RAY_AUTH_MODE": "token"}, tmp_path) == RayToken("token", "~/.ray/auth_token")
    assert gather_ray_token({"RAY_AUTH_TOKEN": "secret"}, tmp_path) == RayToken("", "RAY_AUTH_TOKEN")


def test_a_token_without_a_mode_is_reported_with_other_hosts() -> None:
    (found,) = judge_ray_token("a", RayToken("", "~/.ray/auth_token"), RAY)
    assert found.severity == "warning" and "RAY_AUTH_MODE=token on every host" in found.fix
    assert not list(judge_ray_token("a", RayToken("token", "~/.ray/auth_token"), RAY))
    assert not list(judge_ray_token("a", RayToken(), RAY))
    assert not list(judge_ray_token("a", RayToken("", "RAY_AUTH_TOKEN"), HostRequirements(packages=("ray",)))), (
        "one host"
    )

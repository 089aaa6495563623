"""Whether the parts of a Ray cluster would agree on their token: a file in the home folder turns it on at the head
alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from lockstep.doctor.check.facts import RayToken
from lockstep.doctor.check.needs import Needs
from lockstep.doctor.finding import Finding

SOURCE = "https://docs.ray.io/en/latest/ray-security/token-auth.html"


def gather_ray_token(environ: Mapping[str, str], home: Path | None = None) -> RayToken:
    """Where Ray would find a token here; it is not read."""
    mode = environ.get("RAY_AUTH_MODE", "")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if environ.get(name):
            return RayToken(mode, name)
    file = (home or Path.home()) / ".ray" / "auth_token"
    return RayToken(mode, "~/.ray/auth_token" if file.is_file() else "")


def judge_ray_token(host: str, token: RayToken, needs: Needs) -> Iterator[Finding]:
    """Where a job has other hosts: `ray start --head` takes a token that it finds for the wish to have one, and
    `ray start --address` on another host does not."""
    if not needs.several or "ray" not in needs.packages or token.mode or not token.where:
        return
    said = f"{token.where} is there and RAY_AUTH_MODE is not set"
    why = "a head that is started here asks for the token, other hosts do not send it, and their nodes fail to join"
    fix = "export RAY_AUTH_MODE=token on every host, with the same token on each (or RAY_AUTH_MODE=disabled on all)"
    yield Finding("ray-token", "warning", host, said, why, fix, SOURCE)

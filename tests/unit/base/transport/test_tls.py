"""Certificates, and hosts that cannot make one."""

import hashlib
import socket
import ssl
import threading
from pathlib import Path

import pytest

from lockstep.base.transport import tls
from lockstep.base.transport.auth_handshake import Listener
from lockstep.base.transport.run_token import new_run_token
from lockstep.base.transport.tls import ServerTls, TlsUnavailable, connect_tls
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.config.cluster import LocalClusterConfig


@pytest.mark.parametrize("without", ["", "openssl", "cryptography"])
def test_certificates_are_made_by_what_is_there(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "openssl":
        monkeypatch.setattr(tls.shutil, "which", lambda name: None)
    if without == "cryptography":
        monkeypatch.setattr(tls, "find_spec", lambda name: None)
    server = ServerTls.create()
    near, far = socket.socketpair()
    with near, far:
        thread = threading.Thread(target=lambda: server.accept(far).do_handshake())  # type: ignore[attr-defined]
        thread.start()
        secured, fingerprint = connect_tls(near, "here")
        thread.join(5)
        assert isinstance(secured, ssl.SSLSocket) and secured.version() == "TLSv1.3"
        der = secured.getpeercert(binary_form=True)
        secured.close()
    assert der is not None and fingerprint == server.fingerprint == hashlib.sha256(der).hexdigest()
    assert ServerTls.create().fingerprint != fingerprint, "each has its own"


def test_a_program_that_fails_is_not_relied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "openssl"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    ServerTls.create()
    monkeypatch.setattr(tls, "find_spec", lambda name: None)
    with pytest.raises(TlsUnavailable, match=f"{program} req failed"):
        ServerTls.create()


def test_a_run_that_cannot_encrypt_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls.shutil, "which", lambda name: None)
    monkeypatch.setattr(tls, "find_spec", lambda name: None)
    with pytest.raises(TlsUnavailable, match="pip install cryptography"):
        Listener(new_run_token(tls=True), "r", 1)
    with pytest.raises(TlsUnavailable, match="or leave out"):
        LocalCluster(LocalClusterConfig(tls=True), "no-certificate", tmp_path / "run", 1)
    assert not (tmp_path / "run" / "cluster" / "agent.json").exists()

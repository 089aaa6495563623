"""TLS for the connections of a run. Every listener makes a certificate of its own when it starts; the handshake that
follows proves by the run's token that both ends see the same certificate, so no authority and no files are needed.
"""

import contextlib
import datetime
import functools
import hashlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
from dataclasses import dataclass
from importlib.util import find_spec

from lockstep.base.errors import PicklableError
from lockstep.base.transport.frames import HandshakeRefused, os_error_reason

OPENSSL_TIMEOUT_S = 20.0
_COMMON_NAME = "lockstep"
_VALID_DAYS = 3650
"""Nobody looks at the dates, because the certificate is pinned."""


class TlsUnavailable(PicklableError, OSError):
    """This host cannot make a certificate."""

    error_code = "tls_unavailable"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"cluster.tls needs a certificate, and this host cannot make one: {why}. Install the package cryptography "
            "(pip install cryptography) or the program openssl on every host of the run, or leave out cluster.tls"
        )
        self.why = why


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a listener needs."""

    context: ssl.SSLContext
    fingerprint: str
    """SHA-256 of its certificate, in hex."""

    @staticmethod
    def create() -> "ServerTls":
        """Makes a key and a certificate, which exist in memory only. Raises TlsUnavailable."""
        pem = _make_certificate()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        descriptor = os.memfd_create("certificate")  # ssl reads keys from files only
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        begin = pem.index(b"-----BEGIN CERTIFICATE-----")
        return ServerTls(context, certificate_fingerprint(ssl.PEM_cert_to_DER_cert(pem[begin:].decode().strip())))

    def accept(self, sock: socket.socket) -> socket.socket:
        """Wraps an accepted non-blocking socket, for `handshake`."""
        return self.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    @staticmethod
    def handshake(sock: socket.socket) -> bool:
        """Continues to open TLS on a socket of `accept`; returns whether it is open. Raises OSError."""
        assert isinstance(sock, ssl.SSLSocket)
        try:
            sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        return True

    @staticmethod
    def blocked(error: OSError) -> bool:
        """Whether an error says that more has to arrive first."""
        return isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError)


def connect_tls(sock: socket.socket, where: str) -> tuple[socket.socket, str]:
    """Opens TLS on a connected socket within its time limit. Returns the fingerprint of the listener's certificate too,
    which the caller has to verify. Raises HandshakeRefused, OSError."""
    try:
        secured = _client_context().wrap_socket(sock)
    except ssl.SSLError as error:
        raise HandshakeRefused(where, "protocol", f"it does not open TLS ({os_error_reason(error)})") from None
    return secured, certificate_fingerprint(secured.getpeercert(binary_form=True) or b"")


def certificate_fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate in DER form, in hex."""
    return hashlib.sha256(certificate).hexdigest()


class TlsSocket:
    """A non-blocking TLS socket with the methods of a TCP socket. Unlike `ssl.SSLSocket`, one thread may send while
    another receives, and a call that cannot continue raises BlockingIOError."""

    def __init__(self, sock: socket.socket) -> None:
        assert isinstance(sock, ssl.SSLSocket)
        self._socket = sock
        self._lock = threading.Lock()
        """OpenSSL allows one call at a time; none of them blocks."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, flag: bool) -> None:
        self._socket.setblocking(flag)

    def sendmsg(self, buffers: "list[bytes | bytearray | memoryview]") -> int:
        """Sends a part of the first buffer: a record holds 16 KiB, and must be repeated unchanged if it does not leave
        at once."""
        with self._lock:
            try:
                return self._socket.send(buffers[0])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError from error

    def recv(self, size: int) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, buffer: memoryview) -> int:
        """Receives until the buffer is full or nothing more has arrived: what OpenSSL has decrypted, no selector
        reports."""
        filled = 0
        with self._lock:
            while filled < len(buffer):
                try:
                    received = self._socket.recv_into(buffer[filled:])
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                    if filled:
                        break
                    raise BlockingIOError from error
                if not received:
                    break
                filled += received
        return filled

    def shutdown(self, how: int) -> None:
        """Ends the TCP connection, without TLS's farewell. (`SSLSocket.shutdown` would end TLS first, and a thread that
        sends at this moment would send plain bytes.)"""
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        self._socket.close()


@functools.cache
def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the handshake verifies the certificate by the run's token
    return context


def _make_certificate() -> bytes:
    """A new key and a certificate for it, in PEM form, the key first. The program is tried first, because it takes less
    time than importing the package."""
    program = shutil.which("openssl")
    if program is not None and (pem := _by_openssl(program)) is not None:
        return pem
    if find_spec("cryptography") is not None:
        return _by_cryptography()
    raise TlsUnavailable("neither is installed" if program is None else f"{program} req failed")


def _by_cryptography() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _COMMON_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(pem, form, plain) + certificate.public_bytes(pem)


def _by_openssl(program: str) -> bytes | None:
    command = [
        program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256",
        "-days", str(_VALID_DAYS), "-subj", f"/CN={_COMMON_NAME}", "-keyout", "-", "-out", "-",
    ]  # fmt: skip
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=OPENSSL_TIMEOUT_S, check=True)
        if b"PRIVATE KEY-----" in done.stdout and b"-----BEGIN CERTIFICATE-----" in done.stdout:
            return done.stdout
    return None

"""An S3 server in a process of its own."""

import socket
import subprocess
import sys
import time

KEYS = {"AWS_ACCESS_KEY_ID": "key-of-a-test", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test", "AWS_REGION": "us-east-1"}


class S3Server:
    """moto's server, a process that can be stopped, resumed, killed and started again (without its objects)."""

    def __init__(self, port: int) -> None:
        self.port, self.process = port, None

    def start(self) -> "S3Server":
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.1)
        raise AssertionError("the S3 server does not listen")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


def start_server() -> S3Server:
    """A server on a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return S3Server(port).start()

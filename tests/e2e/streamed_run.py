"""`lockstep` with weights that go from device to device between CPUs: over gloo, as no config asks for it. Of version 2
only the first engine is a member: the others take it from host memory."""

from collections.abc import Sequence
from functools import partial

from lockstep.cli import app
from lockstep.cluster.protocol import Worker
from lockstep.run import publish
from lockstep.weights.choose import DirectChoice


class Partly(publish.DeviceSync):
    def publish(self, version: int, engines: Sequence[Worker]) -> list[Worker]:
        return super().publish(version, engines[:1] if version == 2 else engines)


publish.DeviceSync = Partly
publish.choose_direct = lambda *_: DirectChoice("nccl", "a test says so")
publish.Terms = partial(publish.Terms, backend="gloo")

if __name__ == "__main__":
    app()

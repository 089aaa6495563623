"""`lockstep` with weights that go from device to device between CPUs: over gloo, as no config asks for it. Of version 2
only the first engine is a member: the others take it from host memory."""

from collections.abc import Sequence
from functools import partial

from lockstep.cli import app
from lockstep.cluster.protocol import Worker
from lockstep.run import weight_sync
from lockstep.run.weight_sync import ChannelSettings, DeviceWeightSync
from lockstep.weights.weight_transport import DeviceTransportChoice


class Partly(DeviceWeightSync):
    def publish(self, version: int, engines: Sequence[Worker]) -> list[Worker]:
        return super().publish(version, engines[:1] if version == 2 else engines)


weight_sync.DeviceWeightSync = Partly
weight_sync.select_device_transport = lambda *_: DeviceTransportChoice("nccl", "a test says so")
weight_sync.ChannelSettings = partial(ChannelSettings, backend="gloo")

if __name__ == "__main__":
    app()

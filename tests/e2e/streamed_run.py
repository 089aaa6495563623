"""`lockstep` with weights streamed between CPU processes over gloo, which no config can select. For version 2 only the
first engine is a member of the channel; the others load it from host memory."""

from collections.abc import Sequence
from functools import partial

from lockstep.__main__ import main
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
    main()

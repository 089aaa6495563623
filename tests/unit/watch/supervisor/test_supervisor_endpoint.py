"""The name by which the nodes of a job ask for their supervisor."""

import json

from lockstep.base.folders import run_shm_dir
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.supervisor.multi_node import WATCH_GENERATION, SupervisorEndpoint


def test_an_address_with_the_name_is_read_again() -> None:
    """A name that no folder may have made the supervisor's own node take its address for damaged."""
    endpoint = SupervisorEndpoint("10.0.0.1", 29477, "5f0c2b7be4a8913d6e7f20c1a9d84b36")
    assert run_shm_dir(endpoint.run).name == endpoint.run and endpoint.token not in endpoint.run
    address = ServiceAddress(endpoint.run, WATCH_GENERATION, "10.0.0.1", 29477, 1)
    text = json.dumps({name: getattr(address, name) for name in address.__dataclass_fields__}).encode()
    assert ServiceAddress.parse(text) == address

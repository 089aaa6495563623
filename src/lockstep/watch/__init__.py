"""Watches jobs: beacons, the recorder of collectives, node agents, the supervisor, and the diagnosis of stalls."""

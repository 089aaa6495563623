"""Rollout engines: their protocol, the service that hosts one, and the controller's client."""

"""The controller's side of the rollout engines."""

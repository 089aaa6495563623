"""`lockstep check`: gathers facts about hosts, within time limits, and judges them with pure functions."""

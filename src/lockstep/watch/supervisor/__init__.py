"""The supervisor: merges the reports of all agents, judges them, writes incidents and informs its subscribers."""

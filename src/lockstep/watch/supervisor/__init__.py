"""The supervisor: merges the reports of all agents, diagnoses the job, writes incidents and informs subscribers."""

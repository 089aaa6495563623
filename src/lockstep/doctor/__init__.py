"""What was wrong with a job: from its logs, dumps and incidents, with a knowledge base that is data."""

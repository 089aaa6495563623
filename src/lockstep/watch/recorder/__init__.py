"""Records a process's collectives inside that process, and carries out the observer's commands."""

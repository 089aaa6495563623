"""The soak: runs that are slow, long-tailed, stopped for moments and starved, and healthy all the time. Whoever is
confirmed to hang in them is accused wrongly."""

"""The soak benchmark counts false alarms: its runs are slow, irregular, briefly stopped and starved, but healthy, so
every confirmed verdict is wrong."""

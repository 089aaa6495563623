"""Facts about a host, as plain data that can be sent to another host."""

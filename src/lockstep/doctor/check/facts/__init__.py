"""Facts about a host: how they are gathered, and the plain data in which they are sent to another host."""

"""Why a run did not start or did not end well."""


class Refused(Exception):
    """The run cannot start as asked; nothing was started and nothing on disk was touched."""


class Interrupted(Exception):
    """The user asked to stop (Ctrl-C); what is finished is durable and the run can be resumed."""

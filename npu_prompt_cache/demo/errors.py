"""What stops the demo."""


class DemoError(Exception):
    """The demo cannot run; the message says what to do."""

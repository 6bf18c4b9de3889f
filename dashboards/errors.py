"""Why a dashboard is not served."""


class PortTaken(Exception):
    """Another program listens on the port that was asked for."""


class WeakToken(Exception):
    """The token that was given is easily guessed."""

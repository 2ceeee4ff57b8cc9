"""Errors a user can cause or must know about. Each message is one sentence: what, where, what to do."""


class DaebmError(Exception):
    """Base of every error that daebm raises on purpose; the command line prints it without a traceback."""


class InputError(DaebmError, ValueError):
    """A value, shape, name or folder that was given is not usable."""


class CheckpointError(DaebmError):
    """A checkpoint or model file is missing, damaged, edited, newer or of another configuration."""


class DivergenceError(DaebmError):
    """Training kept diverging after the stated number of roll-backs."""

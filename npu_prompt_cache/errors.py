"""The errors of the package. Bad values are plain ``ValueError`` and ``TypeError``."""


class PromptCacheError(Exception):
    """Base of every error that is not about a bad argument."""


class AclError(PromptCacheError):
    """A call of the Ascend runtime failed.

    Attributes:
        code: the runtime's error code, such as 207001.
        name: its name in the runtime's headers, such as ``ACL_ERROR_RT_MEMORY_ALLOCATION``.
    """

    def __init__(self, message: str, code: int, name: str) -> None:
        super().__init__(message)
        self.code = code
        self.name = name


class RuntimeNotFound(PromptCacheError):
    """No usable Ascend runtime; the message lists every place that was looked at."""


class UnsupportedModel(PromptCacheError):
    """The model's K/V cannot be cached correctly; the message names the model and the reason."""


class PoolExhausted(PromptCacheError):
    """The pool cannot hold the request; the message says what it holds. Run the request uncached."""


class PinLimitExceeded(PromptCacheError):
    """Pins may hold no more of the pool; the message says how much they do. Nothing was pinned."""


class CacheClosed(PromptCacheError):
    """The cache was closed, or belongs to the process this one was forked from."""


class LeaseReleased(PromptCacheError):
    """A lease was used, or released, after its release."""


class IntegrityError(PromptCacheError):
    """An invariant of the cache does not hold: a defect of this package. Please report it."""

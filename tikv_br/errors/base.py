"""What all errors share: message, hint, exit code, and whether trying again may help."""

from __future__ import annotations

from typing import ClassVar


class TikvBrError(Exception):
    """Base of all errors: ``message`` says what is wrong, ``hint`` what to do next.

    ``retryable`` is a property of the class: whether the same call may succeed a moment later.
    """

    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = "Run again with --log-level debug and report the log if it persists."
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the hint, so that an error survives the way from a Spark task to the driver."""
        return (_rebuild, (type(self), self.message, self.hint))

    @property
    def name(self) -> str:
        """Of the class in docs/exit-codes.md: what a package tells apart for its own ends goes by that."""
        return next(each.__name__ for each in type(self).__mro__ if each.__module__.startswith(f"{__package__}."))

    def to_json(self) -> dict[str, object]:
        """The ``exit_error`` line of ``--output json``."""
        return {
            "message_type": "exit_error",
            "code": self.exit_code,
            "name": self.name,
            "message": self.message,
            "hint": self.hint,
        }


def _rebuild(cls: type[TikvBrError], message: str, hint: str) -> TikvBrError:
    return cls(message, hint=hint)


class UsageError(TikvBrError):
    """A flag or an input file is wrong."""

    exit_code = 2
    default_hint = "See --help for the flag's form."

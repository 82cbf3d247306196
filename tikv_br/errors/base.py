"""The base of all errors, and those of the command line and of this machine."""

from __future__ import annotations

from typing import ClassVar


class TikvBrError(Exception):
    """Base of all errors: ``message`` is what failed and why, ``hint`` what to do next.

    ``retryable`` is set per class: whether the same call may succeed a moment later.
    """

    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = (
        "Run the command again with --log-level debug. If the error persists, report it with the log."
    )
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the hint, so that a Spark task's error reaches the driver unchanged."""
        return (_rebuild, (type(self), self.message, self.hint))

    @property
    def name(self) -> str:
        """Name of the class in docs/exit-codes.md; a package's private subclass has its base's name."""
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
    """A flag or an input file is invalid."""

    exit_code = 2
    default_hint = "See --help for the accepted values."


class SparkUnavailable(TikvBrError):
    """Java or Spark is missing or does not start."""

    exit_code = 50
    default_hint = "Install Java 17 or newer, set JAVA_HOME, and check --spark-master."


class TaskFailed(TikvBrError):
    """A task failed permanently."""

    exit_code = 51


class SparkWorkerUnfit(TikvBrError):
    """The Python of a Spark worker lacks tikv-br or a package, or has another version of Python or tikv-br."""

    exit_code = 55
    default_hint = "Run `tikv-br spark pack FILE` with this Python and pass --spark-archive FILE, or install the same versions on every worker."


class MachineUnfit(TikvBrError):
    """This machine lacks what the command needs, such as memory, open files or a directory for temporary files."""

    exit_code = 56
    default_hint = "Raise the limits of this process, and check the directories that it uses."


class PlaygroundError(TikvBrError):
    """The playground cannot do the operation."""

    exit_code = 53
    default_hint = "See `tikv-br playground list` and the log in the playground's directory."


class OutputFailed(TikvBrError):
    """Standard output cannot be written, for example on a full disk."""

    exit_code = 54
    default_hint = (
        "The operation took effect, but its result was not printed. Free some space for the output, and see the log."
    )


class Interrupted(TikvBrError):
    """The user interrupted the command (SIGINT)."""

    exit_code = 130
    default_hint = "Run the same command again when you are ready."


class OutputClosed(TikvBrError):
    """The reader of standard output has exited (SIGPIPE)."""

    exit_code = 141
    default_hint = "Nothing to do if the reader stopped on purpose, as `head` does."


class Terminated(TikvBrError):
    """The command was terminated (SIGTERM)."""

    exit_code = 143
    default_hint = "Run the same command again when you are ready."

"""Trouble on this machine, and commands that were ended from outside."""

from __future__ import annotations

from tikv_br.errors.base import TikvBrError


class RuntimeEnvironmentError(TikvBrError):
    """Something that the tool needs on this machine is missing or broken."""


class SparkUnavailable(RuntimeEnvironmentError):
    """Java or Spark is missing or does not start."""

    exit_code = 50
    default_hint = "Install Java 17 or newer, set JAVA_HOME, and check --spark-master."


class TaskFailed(RuntimeEnvironmentError):
    """A task failed for good."""

    exit_code = 51


class PackageClash(RuntimeEnvironmentError):
    """Another installed package hides one of ours."""

    exit_code = 52
    default_hint = "Install tikv-br into an environment of its own, with `uv tool install` or `pipx install`."


class PlaygroundError(RuntimeEnvironmentError):
    """The playground cannot do what was asked."""

    exit_code = 53
    default_hint = "See `tikv-br playground list` and the log in the playground's directory."


class OutputFailed(RuntimeEnvironmentError):
    """Standard output cannot be written, as on a full disk."""

    exit_code = 54
    default_hint = "What was done stands, but was not told: free space where the output goes, and see the log."


class Interrupted(TikvBrError):
    """The user interrupted the command (SIGINT)."""

    exit_code = 130
    default_hint = "Run the same command again when you are ready."


class OutputClosed(TikvBrError):
    """Whoever read our standard output has gone (SIGPIPE)."""

    exit_code = 141
    default_hint = "Nothing to do where the reader stopped on purpose, as `head` does."


class Terminated(TikvBrError):
    """The command was told to end (SIGTERM)."""

    exit_code = 143
    default_hint = "Run the same command again when you are ready."

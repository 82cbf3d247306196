"""A servicer context that needs no server."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc


class Aborted(Exception):
    """The call was ended with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class FakeContext:
    """The part of a context that services use: it raises `Aborted` where a real one ends the call."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call."""
        raise Aborted(code, details)

    def is_active(self) -> bool:
        """Nobody hangs up here."""
        return True


def context() -> Any:  # noqa: ANN401 - stands in for grpc.ServicerContext, which is abstract
    """A fresh context."""
    return FakeContext()

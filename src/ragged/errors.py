"""The named errors. An error carries its parts, so that a caller can act on them without parsing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class RaggedError(Exception):
    """Base of everything that this project refuses.

    Attributes:
        argument: name of the argument at fault, such as ``"offsets"``.
        request: position of the request in its batch, or None where no single request is at fault.
        req_id: the caller's own id of that request, or None.
        got: what was found.
        bound: what it was held against.

    ``hint`` says how to mend it; it becomes a note (PEP 678), so that the message stays stable for log searches.
    """

    def __init__(
        self,
        message: str,
        *,
        argument: str | None = None,
        request: int | None = None,
        req_id: object = None,
        got: Any = None,
        bound: Any = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.argument = argument
        self.request = request
        self.req_id = req_id
        self.got = got
        self.bound = bound
        if hint is not None:
            self.add_note(hint)


class RaggedTypeError(RaggedError, TypeError):
    """The wrong kind of thing: a dtype, a float in a list, a string where tokens belong."""


class RaggedValueError(RaggedError, ValueError):
    """The right kind of thing with a wrong value, length, shape, stride or device."""


class RaggedOverflowError(RaggedError, OverflowError):
    """A number that does not fit the integer type it has to live in."""


def request_name(request: int, req_id: object = None) -> str:
    """How every message names a request: ``request 2`` or ``request 2 (id 'chat-7')``."""
    return f"request {request}" if req_id is None else f"request {request} (id {req_id!r})"


def refuses(method: Callable[P, R]) -> Callable[P, R]:
    """Mark a public entry: an error leaves it without its inner frames.

    Those frames hold views of the caller's arrays; while the error lives, ``array.append`` would be a BufferError.
    """

    @functools.wraps(method)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except RaggedError as error:
            error.__context__ = None
            if error.__cause__ is not None:
                error.__cause__ = error.__cause__.with_traceback(None)
            raise error.with_traceback(None)  # noqa: B904 - re-raised, not replaced: the cause is already its own

    return entry

"""Errors as the OpenAI API writes them: one object with a message, a type, the field at fault and a code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from penstock.core import ConfigError, PipelineError, QueueFull, Recovering, RequestError

RETRY_SECONDS: Final = 2
"""What Retry-After says where the server is only busy."""
TIMEOUT: Final = "timeout"
INVALID: Final = "invalid_request_error"
FIELD_PATH: Final = re.compile(r"[.\[]")
"""What separates a field's name from a place in it: ``messages[0].content``."""
INVALID_VALUE: Final = "invalid_value"
"""OpenAI's code of a field that holds what it may not."""
TOO_LONG: Final = "context_length_exceeded"
"""OpenAI's code of a prompt that, with what is to be generated, does not fit: programs then ask another model."""
ERROR_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorObject


Responses = dict[int | str, dict[str, Any]]


def error_responses(*statuses: int) -> Responses:
    """For a route's OpenAPI: these statuses, and whatever else a client did wrong, carry an error object."""
    keys: tuple[int | str, ...] = (*statuses, "4XX")
    return {key: {"model": ErrorResponse} for key in keys}


class ApiError(HTTPException):
    """A reply other than the one that was asked for. ``param`` is the field at fault, ``code`` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param = param
        self.code = code

    @property
    def body(self) -> ErrorResponse:
        type_ = ERROR_TYPES.get(self.status_code, INVALID if self.status_code < 500 else "server_error")
        return ErrorResponse(error=ErrorObject(message=self.detail, type=type_, param=self.param, code=self.code))

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body.model_dump(), self.status_code, dict(self.headers or {}))


def invalid_field(param: str, problem: str, code: str = INVALID_VALUE) -> ApiError:
    """400 for a field: ``problem`` says what is wrong with it and what would be right."""
    return ApiError(400, f"{param} {problem}", param=param, code=code)


def too_long(param: str, problem: str, most: int) -> ApiError:
    """400 for what does not fit into a context of ``most`` tokens, in the words by which programs know it."""
    words = f"{param} {problem} This model's maximum context length is {most} tokens."
    return ApiError(400, words, param=param, code=TOO_LONG)


def busy(message: str, code: str, status: int = 503) -> ApiError:
    """What will pass: the client may come again."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


def timed_out(seconds: float) -> ApiError:
    """The request took too long. Clients are told not to send it again of themselves: it would take as long."""
    message = f"the request was not done within {seconds:g} s (--request-timeout); ask for fewer tokens"
    return ApiError(504, message, code=TIMEOUT, headers={"x-should-retry": "false"})


def client_closed() -> ApiError:
    """The client has left. Nobody reads this; the log shows it, under the number that nginx gave it."""
    return ApiError(499, "the client has closed the connection", code="client_gone")


def api_error(error: Exception, fields: Sequence[str] = (), names: Mapping[str, str] | None = None) -> ApiError:
    """Penstock's errors as replies. Messages begin with the field at fault, if there is one.

    ``fields`` are the request's, and ``names`` what it calls some of ours.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Recovering):
        return busy(str(error), "recovering")
    if isinstance(error, QueueFull):
        return busy(str(error), "rate_limit_exceeded", 429)
    if isinstance(error, RequestError | ConfigError):
        ours = str(error).split(" ", 1)[0].rstrip(":")
        name = (names or {}).get(ours, ours)
        known = name != ours or FIELD_PATH.split(name)[0] in fields
        return ApiError(400, name + str(error).removeprefix(ours), param=name if known else None, code=INVALID_VALUE)
    if isinstance(error, PipelineError):
        return ApiError(503, str(error), code="engine_lost")
    # uvicorn closes the connection behind a reply that the application did not mean to give.
    message, headers = "the server failed; its log says why", {"Connection": "close"}
    return ApiError(500, message, code="internal_error", headers=headers)

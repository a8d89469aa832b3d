"""Errors in the OpenAI API's form: one object with a message, a type, the field at fault and a code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from penstock.core import ConfigError, PipelineError, QueueFull, Recovering, RequestError

RETRY_SECONDS: Final = 2
"""Seconds in the header Retry-After where the server is only busy."""
TIMEOUT: Final = "timeout"
INVALID: Final = "invalid_request_error"
FIELD_PATH: Final = re.compile(r"[.\[]")
"""Separator between a field's name and a place in it, as in ``messages[0].content``."""
INVALID_VALUE: Final = "invalid_value"
"""OpenAI's code for a field with an invalid value."""
TOO_LONG: Final = "context_length_exceeded"
"""OpenAI's code for a prompt that does not fit with its output; some programs then ask another model."""
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
    """A route's responses in OpenAPI: these statuses, and all others of 4XX, carry an error object."""
    keys: tuple[int | str, ...] = (*statuses, "4XX")
    return {key: {"model": ErrorResponse} for key in keys}


class ApiError(HTTPException):
    """An error as a reply. ``param`` is the field at fault, ``code`` a word for programs."""

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
    """The error 400 for a field: ``problem`` says what is wrong with it and what would be right."""
    return ApiError(400, f"{param} {problem}", param=param, code=code)


def too_long(param: str, problem: str, most: int) -> ApiError:
    """The error 400 for a text above a context of ``most`` tokens, in the words by which programs know it."""
    words = f"{param} {problem} This model's maximum context length is {most} tokens."
    return ApiError(400, words, param=param, code=TOO_LONG)


def busy(message: str, code: str, status: int = 503) -> ApiError:
    """An error that will pass: the client may try again after RETRY_SECONDS."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


def timed_out(seconds: float) -> ApiError:
    """The error for a request that took too long. Clients are told not to retry: it would take as long."""
    message = f"the request was not done within {seconds:g} s (--request-timeout); ask for fewer tokens"
    return ApiError(504, message, code=TIMEOUT, headers={"x-should-retry": "false"})


def client_closed() -> ApiError:
    """The error for a client that has left. Nobody reads it; the log shows nginx's status for it, 499."""
    return ApiError(499, "the client has closed the connection", code="client_gone")


def api_error(error: Exception, fields: Sequence[str] = (), names: Mapping[str, str] | None = None) -> ApiError:
    """Any error as a reply. Messages of Penstock's errors begin with the field at fault, if there is one.

    ``fields`` are the names of the request's fields; ``names`` maps some of Penstock's names to the request's.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Recovering):
        return busy(str(error), "recovering")
    if isinstance(error, QueueFull):
        return busy(str(error), "rate_limit_exceeded", 429)
    if isinstance(error, RequestError | ConfigError):
        # The message's first word is the field at fault, under Penstock's name.
        ours = str(error).split(" ", 1)[0].rstrip(":")
        name = (names or {}).get(ours, ours)
        known = name != ours or FIELD_PATH.split(name)[0] in fields
        return ApiError(400, name + str(error).removeprefix(ours), param=name if known else None, code=INVALID_VALUE)
    if isinstance(error, PipelineError):
        return ApiError(503, str(error), code="engine_lost")
    # uvicorn closes the connection after a reply that the application did not intend.
    message, headers = "the server failed; its log says why", {"Connection": "close"}
    return ApiError(500, message, code="internal_error", headers=headers)

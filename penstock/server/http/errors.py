"""Errors as the OpenAI API writes them: one object with a message, a type, the field at fault and a code."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from penstock.core import ConfigError, PipelineError, RequestError
from penstock.engine.async_llm import QueueFull

RETRY_SECONDS: Final = 2
"""What Retry-After says where the server is only busy."""
INVALID: Final = "invalid_request_error"
KINDS: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorObject


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
        kind = KINDS.get(self.status_code, INVALID if self.status_code < 500 else "server_error")
        return ErrorResponse(error=ErrorObject(message=self.detail, type=kind, param=self.param, code=self.code))

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body.model_dump(), self.status_code, dict(self.headers or {}))


def bad(param: str, problem: str) -> ApiError:
    """400 for a field: ``problem`` says what is wrong with it and what would be right."""
    return ApiError(400, f"{param} {problem}", param=param)


def busy(message: str, code: str, status: int = 503) -> ApiError:
    """What will pass: the client may come again."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_SECONDS)})


def timed_out(seconds: float) -> ApiError:
    """The request took too long. Clients are told not to send it again of themselves: it would take as long."""
    message = f"the request was not done within {seconds:g} s (--request-timeout); ask for fewer tokens"
    return ApiError(504, message, code="timeout", headers={"x-should-retry": "false"})


def api_error(error: Exception, fields: Sequence[str] = (), names: Mapping[str, str] | None = None) -> ApiError:
    """Penstock's errors as replies. Messages begin with the field at fault, if there is one.

    ``fields`` are the request's, and ``names`` what it calls some of ours.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return busy(str(error), "queue_full", 429)
    if isinstance(error, RequestError | ConfigError):
        ours = str(error).split(" ", 1)[0].rstrip(":")
        name = (names or {}).get(ours, ours)
        known = name != ours or name.split(".")[0] in fields
        return ApiError(400, name + str(error).removeprefix(ours), param=name if known else None)
    if isinstance(error, PipelineError):
        return ApiError(503, str(error), code="engine_lost")
    return ApiError(500, "the server failed; its log says why", code="internal_error")


# --------------------------------------------------------------------------------------------- what pydantic refuses


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any, known: Sequence[str]) -> ApiError:
    """The most specific of what pydantic found: of a union's alternatives it reports each."""
    worst = max(errors, key=lambda one: len(one["loc"]))
    if worst["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {worst['ctx']['error']}", code="invalid_json")
    param = path_of(worst["loc"][1:], body)
    if worst["type"] == "value_error":
        # Our own checks: of the whole body they begin with the field at fault, of a part with what is wrong with it.
        problem = str(worst["ctx"]["error"])
        return bad(param, problem) if param else bad(*problem.split(" ", 1))
    if not param:
        return ApiError(400, "the body has to be a JSON object, sent with Content-Type: application/json")
    if worst["type"] == "extra_forbidden":
        close = difflib.get_close_matches(param, known, n=1)
        hint = f", or did you mean {close[0]!r}?" if close else ""
        return bad(param, f"is not supported here: remove it{hint}")
    if worst["type"] == "missing":
        return bad(param, "is missing")
    return bad(param, f"is {reprlib.repr(worst['input'])}; {wanted(worst)}")


def wanted(found: Mapping[str, Any]) -> str:
    """What a value has to be: pydantic's words, but where they speak of pydantic."""
    if found["type"] == "union_tag_invalid":
        field = str(found["ctx"]["discriminator"]).strip("'")
        return f"its {field} has to be one of {found['ctx']['expected_tags']}"
    words: str = found["msg"]
    return re.sub(r"^[A-Z]\w+ should ", "it has to ", words.partition(" after validation")[0])


def path_of(location: Sequence[str | int], body: Any) -> str:
    """``messages[0].content``: the path in what was sent; names of a union's alternatives are left out."""
    path, here = "", body
    for number, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
            here = here[part] if isinstance(here, list) and part < len(here) else None
        elif isinstance(here, dict) and (part in here or number == len(location) - 1):
            path += f".{part}" if path else part
            here = here.get(part)
    return path


# -------------------------------------------------------------------------------------------------------- handlers


def install(app: FastAPI) -> None:
    """Every error leaves ``app`` as an error object: also of unknown paths, wrong methods and faults of our own."""
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_fault)


async def on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return noted(request, validation_error(error.errors(), error.body, known_fields(request)))


async def on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        message = str(error.detail)
        if message == HTTPStatus.NOT_FOUND.phrase:
            message = f"there is nothing at {request.method} {request.url.path!r}"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{request.url.path} does not take {request.method}"
        code = None
        if isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI says only that it cannot parse the body
            message, code = f"the body is not JSON: {error.__cause__}", "invalid_json"
        error = ApiError(error.status_code, message, code=code, headers=error.headers)
    return noted(request, error)


async def on_fault(request: Request, error: Exception) -> Response:
    return api_error(error).response


def noted(request: Request, error: ApiError) -> Response:
    """The reply; what it was about goes into the request's line in the log."""
    request.state.record.note(error)
    return error.response


def known_fields(request: Request) -> list[str]:
    """The fields of the body that the request's route takes."""
    body = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []

"""Error handlers: every error leaves the application as an error object, those of unknown paths and bugs, too."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from penstock.core import PenstockError
from penstock.server.http.errors import ApiError, api_error, invalid_field
from penstock.server.http.records import record_of
from penstock.server.http.validation import long_number_of, validation_error


def install(app: FastAPI, reasons: Mapping[str, str] | None = None) -> None:
    """Add the handlers to ``app``. ``reasons`` say, by field, why fields that no route reads are refused."""

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = validation_error(error.errors(), error.body, known_fields(request), reasons)
        return error_reply(request, found)

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(PenstockError, on_penstock)
    app.add_exception_handler(Exception, on_fault)


async def on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        message, code = str(error.detail), "invalid_request"
        if message == HTTPStatus.NOT_FOUND.phrase:
            message, code = f"there is nothing at {request.method} {request.url.path!r}", "unknown_url"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            message, code = f"{request.url.path} does not take {request.method}", "method_not_supported"
        if isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI says only that it cannot parse the body
            reason = str(error.__cause__)
            message, code = f"the body is not JSON: {reason}", "invalid_json"
            if "int_max_str_digits" in reason:  # Python's remedy is none for a client
                return error_reply(request, invalid_field(*long_number_of(await request.body()), code))
        error = ApiError(error.status_code, message, code=code, headers=error.headers)
    return error_reply(request, error)


async def on_penstock(request: Request, error: Exception) -> Response:
    """Reply to one of Penstock's own errors, such as a lost engine: it is no bug of the application."""
    return error_reply(request, api_error(error))


async def on_fault(request: Request, error: Exception) -> Response:
    return api_error(error).response


def error_reply(request: Request, error: ApiError) -> Response:
    """The reply. The request's line in the log gets the error's code and field."""
    record_of(request).note(error)
    return error.response


def known_fields(request: Request) -> list[str]:
    """The fields of the body that the request's route reads."""
    body = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []

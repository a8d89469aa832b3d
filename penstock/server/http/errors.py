"""Errors in the OpenAI API's form, the fields at fault, and server-sent events."""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Final

import msgspec
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from penstock.config import meant
from penstock.core import (
    HALF,
    ConfigError,
    PenstockError,
    PipelineError,
    QueueFull,
    Recovering,
    RequestError,
    lone_surrogate,
)

# --------------------------------------------------------------------------------------------------------------- errors
# Errors in the OpenAI API's form: one object with a message, a type, the field at fault and a code.

RETRY_SECONDS: Final = 2
"""Seconds in the header Retry-After where the server is only busy. Sooner, refused clients would add to the load;
later, they would leave the server idle."""
TIMEOUT: Final = "timeout"
"""Penstock's code for a request that took longer than it may."""
INVALID: Final = "invalid_request_error"
"""OpenAI's type of errors in a request."""
FIELD_PATH: Final = re.compile(r"[.\[]")
"""Separator between a field's name and a place in it, as in ``messages[0].content``."""
INVALID_VALUE: Final = "invalid_value"
"""OpenAI's code for a field with an invalid value."""
TOO_LONG: Final = "context_length_exceeded"
"""OpenAI's code for a prompt that does not fit with its output; some programs then ask another model."""
ERROR_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""HTTP status -> OpenAI's type of error, where it is not ``INVALID`` or "server_error"."""


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
        """The error object, as a reply carries it."""
        type_ = ERROR_TYPES.get(self.status_code, INVALID if self.status_code < 500 else "server_error")
        return ErrorResponse(error=ErrorObject(message=self.detail, type=type_, param=self.param, code=self.code))

    @property
    def response(self) -> JSONResponse:
        """The reply, with the error's status and headers."""
        return JSONResponse(self.body.model_dump(), self.status_code, dict(self.headers or {}))


def invalid_field(param: str, problem: str, code: str = INVALID_VALUE) -> ApiError:
    """The error 400 for a field, or ``WHOLE_BODY``: ``problem`` says what is wrong with it and what would be right."""
    return ApiError(400, f"{param} {problem}", param=None if param == WHOLE_BODY else param, code=code)


WHOLE_BODY: Final = "the body"
"""Words for what is wrong with no field of its own."""


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


# ----------------------------------------------------------------------------------------------------------- validation
# pydantic's findings on a request's body, as one error that names the field.

CODES: Final = {
    "missing": "missing_required_parameter",
    "too_long": "array_above_max_length",
    "too_short": "empty_array",
    "string_too_long": "string_above_max_length",
    "extra_forbidden": "unknown_parameter",
}
"""OpenAI's error codes, by pydantic's type of a finding."""


def validation_error(
    errors: Sequence[Mapping[str, Any]], body: Any, known: Sequence[str], reasons: Mapping[str, str] | None = None
) -> ApiError:
    """The error for pydantic's most specific finding; of a union it reports those of every alternative.

    ``known`` are the body's fields, and ``reasons`` say why some others are refused. "too_long" comes first: such a
    list has items of the right type, so that no other alternative fits better.
    """
    worst = max(errors, key=lambda one: (one["type"] == "too_long", len(one["loc"])))
    if worst["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {worst['ctx']['error']}", code="invalid_json")
    param, code = path_of(worst["loc"][1:], body, missing=worst["type"] == "missing"), code_of(worst)
    if worst["type"] == "value_error":
        # Penstock's own checks: of the whole body they begin with the field, of a part with what is wrong with it.
        problem = str(worst["ctx"]["error"])
        if problem.startswith(WHOLE_BODY):
            return invalid_field(WHOLE_BODY, problem.removeprefix(f"{WHOLE_BODY} "))
        return invalid_field(param, problem) if param else invalid_field(*problem.split(" ", 1))
    if not param:
        message = "the body has to be a JSON object, sent with Content-Type: application/json"
        return ApiError(400, message, code=code)
    if worst["type"] == "extra_forbidden":
        return unknown_field(param, known, reasons or {})
    if worst["type"] == "missing":
        return invalid_field(param, "is missing", code)
    if worst["type"] == "too_long":
        most = worst["ctx"]["max_length"]
        return invalid_field(param, f"has {len(worst['input'])} items; there may be at most {most}", code)
    return invalid_field(param, f"is {reprlib.repr(worst['input'])}; {wanted(worst)}", code)


def unknown_field(param: str, known: Sequence[str], reasons: Mapping[str, str]) -> ApiError:
    """The error 400 for a field that is not read here, with the reason if it is known from other servers."""
    if (reason := reasons.get(param)) is not None:
        return invalid_field(param, reason, "unsupported_parameter")
    guess = meant(param, known)
    hint = f", or did you mean {guess!r}?" if guess is not None else ""
    return invalid_field(param, f"is not supported here: remove it{hint}", "unknown_parameter")


def code_of(found: Mapping[str, Any]) -> str:
    """OpenAI's code for a finding of pydantic."""
    kind = found["type"]
    if kind.startswith(("greater_than", "less_than")):
        # A field that takes any number has a float as its bound, whatever the client has sent.
        number = "decimal" if any(isinstance(bound, float) for bound in found["ctx"].values()) else "integer"
        return f"{number}_{'below_min' if kind.startswith('greater') else 'above_max'}_value"
    if kind.endswith(("_type", "_parsing", "_attributes_type")):
        return "invalid_type"
    return CODES.get(kind, INVALID_VALUE)


def wanted(found: Mapping[str, Any]) -> str:
    """The words that say what a value has to be: pydantic's, except where they use pydantic's own terms."""
    if found["type"] == "union_tag_invalid":
        field = str(found["ctx"]["discriminator"]).strip("'")
        return f"its {field} has to be one of {found['ctx']['expected_tags']}"
    return re.sub(r"^[A-Z]\w+ should ", "it has to ", found["msg"])


def path_of(location: Sequence[str | int], body: Any, *, missing: bool) -> str:
    """The path of a finding in the body, as ``messages[0].content``; names of a union's alternatives are left out.

    ``missing`` says that the value named last is absent.
    """
    path, here = "", body
    for number, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
            here = here[part] if isinstance(here, list) and part < len(here) else None
        elif isinstance(here, dict) and (part in here or (missing and number == len(location) - 1)):
            path += f".{part}" if path else part
            here = here.get(part)
    return path


def long_number_of(body: bytes) -> tuple[str, str]:
    """The path to the number that has more digits than Python converts, and what is wrong with it."""
    most = sys.get_int_max_str_digits()

    def number(text: str) -> Any:
        return _LongNumber(text) if len(text) > most else 0

    left = [("", json.loads(body, parse_int=number))]
    while left:
        where, value = left.pop()
        if isinstance(value, _LongNumber):
            return where or WHOLE_BODY, f"is a number of {len(value.lstrip('-')):,} digits; it may have {most:,}"
        if isinstance(value, dict):
            left += [(f"{where}.{key}" if where else key, item) for key, item in value.items()]
        elif isinstance(value, list):
            left += [(f"{where}[{place}]", item) for place, item in enumerate(value)]
    return WHOLE_BODY, f"holds a number of more than {most:,} digits"


class _LongNumber(str):
    """The text of a number that has too many digits."""


def check_unicode(body: Any) -> Any:
    """The body unchanged. Raises ValueError, which begins with the field, for a text that is not valid Unicode."""
    # A stack, not recursion: the body is a stranger's and may be nested deeply.
    left = [("", body)]
    while left:
        where, value = left.pop()
        if isinstance(value, str):
            if lone_surrogate(value):
                raise ValueError(f"{where} {HALF}")
        elif isinstance(value, dict):
            inner = [(f"{where}.{key}" if where else str(key), item) for key, item in value.items()]
            left += [*inner, *((where or WHOLE_BODY, key) for key in value)]
        elif isinstance(value, list):
            left += [(f"{where}[{number}]", item) for number, item in enumerate(value)]
    return body


# --------------------------------------------------------------------------------------------------------- field errors
# Penstock's errors as replies that name fields as the request does.

OUR_NAMES: Final = {"request_id": "X-Request-Id", "prompt_token_ids": "prompt"}
"""Names that requests have for fields of ``AsyncLLM.submit``."""


@contextmanager
def api_errors(body: BaseModel, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn errors within the block into ApiError. ``names`` maps Penstock's names of fields to the request's."""
    try:
        yield
    except PenstockError as error:
        raise api_error(error, list(type(body).model_fields), OUR_NAMES | dict(names or {})) from error
    except RecursionError as error:
        message = "the body nests too deep for whoever reads it: nest its schemas and template variables less"
        raise ApiError(400, message) from error


# ------------------------------------------------------------------------------------------------------------------ sse
# Server-sent events: the OpenAI API's have no names and end with ``[DONE]``, those of the live view have names.

DONE: Final = b"data: [DONE]\n\n"
"""The last line of a stream without named events."""
MEDIA_TYPE: Final = "text/event-stream"
"""The type of a stream of events."""
HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers that keep events from being stored, and proxies from buffering them."""


def event(data: BaseModel | msgspec.Struct, name: str = "") -> bytes:
    """One event with ``data`` as JSON, of a pydantic model only the fields that were set. ``name`` may be ""."""
    if isinstance(data, msgspec.Struct):
        body = msgspec.json.encode(data)
    else:
        body = data.model_dump_json(exclude_unset=True).encode()
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + body + b"\n\n"


class EventStream(Response):
    """A response that sends events as they come, each one after its reader took those before, and then calls ``close``.

    Unlike StreamingResponse it closes the generator of the events itself, however it ends, even before it began, and
    leaves it to the generator to notice that the client has left.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        """Make the response; ``headers`` are sent beside those of every stream."""
        super().__init__(headers=HEADERS | dict(headers or {}))
        # Response has set it to the length of an empty body.
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()

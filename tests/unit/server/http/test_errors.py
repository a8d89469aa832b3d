"""Penstock's errors as replies."""

from __future__ import annotations

import pytest

from penstock.core import PipelineError, QueueFull, Recovering, RequestError
from penstock.server.http.errors import api_error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFull("full"), 429),
        (Recovering("full for now"), 503),
        (RequestError("bad"), 400),
        (PipelineError("lost"), 503),
        (KeyError("bug"), 500),
    ],
)
def test_errors_and_their_status(error: Exception, status: int) -> None:
    found = api_error(error)
    assert found.status_code == status
    passes = isinstance(error, QueueFull)
    assert ("Retry-After" in (found.headers or {})) is passes, "what is lost does not come back"


def test_penstocks_errors_name_the_field_as_the_request_does() -> None:
    error = RequestError("structured_outputs.json is no schema")
    names = {"structured_outputs.json": "guided_json"}
    assert api_error(error, ["guided_json"], names).param == "guided_json"
    assert api_error(error, ["guided_json"], names).detail == "guided_json is no schema"
    assert api_error(RequestError("temperature is -1"), ["temperature"]).param == "temperature"
    assert api_error(RequestError("the text is bad"), ["temperature"]).param is None

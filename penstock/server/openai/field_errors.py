"""Penstock's errors as replies that name a field as the request calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pydantic import BaseModel

from penstock.core import PenstockError
from penstock.server.http.errors import ApiError, api_error

OUR_NAMES: Final = {"request_id": "X-Request-Id", "prompt_token_ids": "prompt"}
"""What requests call the fields of ``AsyncLLM.submit``."""


@contextmanager
def api_errors(body: BaseModel, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn errors into ApiError. ``names`` says what this request calls fields that have another name in Penstock."""
    try:
        yield
    except PenstockError as error:
        raise api_error(error, list(type(body).model_fields), OUR_NAMES | dict(names or {})) from error
    except RecursionError as error:
        message = "the body nests too deep for whoever reads it: nest its schemas and template variables less"
        raise ApiError(400, message) from error

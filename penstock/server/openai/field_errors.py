"""Penstock's errors as replies that name fields as the request does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pydantic import BaseModel

from penstock.core import PenstockError
from penstock.server.http.errors import ApiError, api_error

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

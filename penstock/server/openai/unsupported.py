"""Routes of the OpenAI API that a language model cannot serve: refused with the reason, not as unknown paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter

from penstock.server.http.errors import ApiError

TEXT_ALONE: Final = "the model here writes text"
REASONS: Final = {
    "/v1/embeddings": f"{TEXT_ALONE} and has no embeddings: ask a server that runs an embedding model",
    "/v1/moderations": f"{TEXT_ALONE} and judges none: ask a server that runs a moderation model",
    "/v1/images/generations": f"{TEXT_ALONE}, and no images",
    "/v1/audio/speech": f"{TEXT_ALONE}, and no sound",
    "/v1/audio/transcriptions": f"{TEXT_ALONE} and reads no sound",
}


def unsupported_router() -> APIRouter:
    routes = APIRouter()
    for path, reason in REASONS.items():
        routes.add_api_route(path, refusing(path, reason), methods=["POST"], include_in_schema=False)
    return routes


def refusing(path: str, reason: str) -> Callable[[], None]:
    def refuse() -> None:
        raise ApiError(404, f"{path} is not served: {reason}", code="unsupported")

    return refuse

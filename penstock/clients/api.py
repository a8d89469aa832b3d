"""A client of an OpenAI-compatible server: requests, streamed answers, errors in words, and a server's engines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
from httpx_sse import ServerSentEvent

from penstock.config import SERVER, FieldError, Option
from penstock.core import NO_HOST, PenstockError, from_json
from penstock.environment import API_KEY_VARIABLE, read_api_keys

# ------------------------------------------------------------------------------------------------------------------ api
# A client's view of an OpenAI-compatible server: its address, its models, and its errors in words.

DEFAULT_URL: Final = "http://127.0.0.1:8000/v1"
"""The address of a server that runs on this host with its default port."""
CONNECT_SECONDS: Final = 10.0
"""Seconds in which a server has to accept a connection. A host that drops packets would otherwise hold a client for
``SILENCE_SECONDS``."""
SILENCE_SECONDS: Final = 600.0
"""Seconds without a byte after which a connection is given up; a long prompt in a long queue may take minutes."""
ServedModel = Annotated[
    str | None, Option("Name of one of the models that the server has.", SERVER, default="the first it names")
]
LONGEST_MESSAGE: Final = 300
"""Characters of a server's error message that are shown: about four lines of a terminal."""


class ServerError(PenstockError):
    """A server is unreachable, refuses a request or breaks an answer off.

    ``kind`` is the same for errors of one cause, so that they can be counted: "HTTP 429", "broken off".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server's address and key. ``url`` ends in the API's version; /v1 is added to an address that has no path.

    Raises FieldError for an address that cannot be used, or a key file that cannot be read.
    """

    url: Annotated[
        str, Option("Address of the OpenAI-compatible server, with its /v1.", SERVER, default=DEFAULT_URL)
    ] = DEFAULT_URL
    api_key: Annotated[
        str | None, Option("Key that the server wants, if any.", SERVER, envvar=API_KEY_VARIABLE, default="")
    ] = field(default=None, repr=False)
    api_key_file: Annotated[
        Path | None, Option("File with the key, in place of --api-key.", SERVER, metavar="FILE", default="")
    ] = None

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise FieldError("url", f"is {self.url!r}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise FieldError("url", f"is {self.url!r}; it has to begin with http:// or https:// and a host")
        try:
            url.host.encode("idna")  # as Python does before it looks a name up
        except UnicodeError as error:
            raise FieldError("url", f"is {self.url!r}, with the host {url.host!r}: {NO_HOST}") from error
        if self.api_key_file is not None:
            object.__setattr__(self, "api_key", read_api_keys(self.api_key_file)[0])
        path = url.path.rstrip("/") or "/v1"
        object.__setattr__(self, "url", str(url.copy_with(path=path)))

    @property
    def root(self) -> str:
        """The address without the API's version, for /metrics and /health."""
        return self.url.removesuffix("/v1")

    @property
    def shown(self) -> str:
        """The address without user name and password."""
        return str(httpx.URL(self.url).copy_with(userinfo=b""))

    @property
    def client_options(self) -> dict[str, Any]:
        """Arguments for ``httpx.Client`` and ``httpx.AsyncClient``. Connections are unlimited, for load tests."""
        return {
            "base_url": self.url,
            "headers": {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"},
            "timeout": httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
        }

    def lost(self, error: httpx.HTTPError) -> ServerError:
        """The error for a connection that failed."""
        kind = type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(
                kind,
                f"no server answers at {self.shown} ({error or kind}); start one with 'penstock serve MODEL', or say "
                "where it is with --url",
            )
        return ServerError(kind, f"{self.shown}: {error or 'connection lost'} ({kind})")


def refused(response: httpx.Response) -> ServerError:
    """The error for a status other than success. The response's body has to be read already."""
    message = message_of(response.content) or response.reason_phrase
    if response.status_code == httpx.codes.UNAUTHORIZED:
        message += f"; give the key with --api-key-file or {API_KEY_VARIABLE}"
    return ServerError(f"HTTP {response.status_code}", f"the server answers {response.status_code}: {message}")


def answered(response: httpx.Response, field: str) -> Any:
    """A field of an answer in JSON. Raises ServerError for a status other than success, and where the field is not."""
    if not response.is_success:
        raise refused(response)
    try:
        return response.json()[field]
    except (ValueError, LookupError, TypeError) as error:
        message = f"the answer to {response.url.path} has no {field!r}: is another server than penstock serve there?"
        raise ServerError("another server", message) from error


def message_of(body: bytes) -> str:
    """The message in an error's body, in OpenAI's form or FastAPI's; for another body its beginning."""
    try:
        content: Any = from_json(body)
    except ValueError:
        return body[:LONGEST_MESSAGE].decode(errors="replace").strip()
    if isinstance(content, dict):
        content = content.get("error") or content.get("detail") or content
    if isinstance(content, dict):
        content = content.get("message", content)
    return (content if isinstance(content, str) else json.dumps(content))[:LONGEST_MESSAGE]


def first_model(response: httpx.Response) -> str:
    """The first model's name in the answer to GET /models. Raises ServerError if there is none."""
    return str(first_card(response)["id"])


def card_of(response: httpx.Response, model: str) -> dict[str, Any] | None:
    """The entry of ``model`` in the answer to GET /models; None where there is none."""
    try:
        cards = response.json()["data"]
        return next((dict(card) for card in cards if card["id"] == model), None)
    except (ValueError, LookupError, TypeError):
        return None


def first_card(response: httpx.Response) -> dict[str, Any]:
    """The first model's entry in the answer to GET /models, with its ``id``. Raises ServerError if there is none."""
    if not response.is_success:
        raise refused(response)
    try:
        card = response.json()["data"][0]
        return {**card, "id": card["id"]}
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError("no model", "the server's list of models cannot be read; name one with --model") from error


# --------------------------------------------------------------------------------------------------------------- stream
# Turns server-sent events into the chunks of a streamed answer.
#
# The format is OpenAI's: each event is a JSON object, and after the last one comes ``[DONE]``.

DONE: Final = "[DONE]"
"""The text of the event that ends a stream."""
TEXTS: Final = ("content", "reasoning_content", "reasoning")
"""Fields of a chat's delta that may hold text; other servers put a model's reasoning into the last two."""


@dataclass(frozen=True)
class Usage:
    """Token counts as the server states them; None for a count that it does not state.

    ``accepted`` and ``rejected`` count drafted tokens: OpenAI's accepted_prediction_tokens and
    rejected_prediction_tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    accepted: int | None = None
    rejected: int | None = None


@dataclass(frozen=True)
class Chunk:
    """One event of a stream. ``text`` is empty where the event has only a role, the end of the answer or the usage."""

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    speed_up: float | None = None
    """Speed in proportion to plain decoding, where the server has measured both, as Penstock's does."""


class AnswerStream:
    """A converter of one answer's events to chunks, which notes whether the answer was finished."""

    def __init__(self) -> None:
        self._finished = False

    def take(self, event: ServerSentEvent) -> Iterator[Chunk]:
        """The event's chunk, if it has one. Raises ServerError for an error event, or one that is no JSON object."""
        if event.data == DONE:
            self._finished = True
        elif event.data:
            chunk = read_chunk(event.data)
            # Some servers close the stream without [DONE]: a finish reason ends the answer as well.
            self._finished |= chunk.finish_reason is not None
            yield chunk

    def close(self) -> None:
        """End the stream. Raises ServerError if the connection ended before the answer."""
        if not self._finished:
            raise ServerError("broken off", "the server closed the stream before the answer was finished")


def read_chunk(payload: str) -> Chunk:
    """The chunk in one event's JSON, of /chat/completions or /completions. Only its first choice counts.

    Raises ServerError for an error that the server sends, and for any other form.
    """
    try:
        event: Any = from_json(payload)
    except ValueError as error:
        raise ServerError("bad stream", f"the server sent an event that is not JSON: {payload[:80]!r}") from error
    if not isinstance(event, dict):
        raise ServerError("bad stream", f"the server sent an event that is no object: {payload[:80]!r}")
    if event.get("error") or event.get("object") == "error":
        # An error after the answer has begun comes as an event, since the status was sent long before.
        raise ServerError("error event", f"the server ended the answer: {message_of(payload.encode())}")
    try:
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        text = "".join([choice.get("text") or "", *(delta.get(name) or "" for name in TEXTS)])
        speed_up = (event.get("metrics") or {}).get("speed_up")
        return Chunk(text, choice.get("finish_reason"), read_usage(event.get("usage")), speed_up)
    except (AttributeError, LookupError, TypeError) as error:
        raise ServerError("bad stream", f"the server sent an event that is no chunk: {payload[:80]!r}") from error


def read_usage(usage: Mapping[str, Any] | None) -> Usage | None:
    """The token counts in a chunk's ``usage``; None where it has none, as in all chunks but the last."""
    if not usage or not {"prompt_tokens", "completion_tokens"} <= usage.keys():
        return None
    prompt, completion = (usage.get(f"{part}_tokens_details") or {} for part in ("prompt", "completion"))
    return Usage(
        usage["prompt_tokens"],
        usage["completion_tokens"],
        prompt.get("cached_tokens"),
        completion.get("accepted_prediction_tokens"),
        completion.get("rejected_prediction_tokens"),
    )


# ------------------------------------------------------------------------------------------------------------ rebalance
# The work of ``penstock rebalance``.


def rebalance(server: Server) -> None:
    """Ask the server to move stages back to their hosts, and print whether any moves.

    Raises ServerError if it does not answer, or refuses.
    """
    try:
        with httpx.Client(**server.client_options) as client:
            answer = client.post(f"{server.root}/rebalance", json={})
    except httpx.HTTPError as error:
        raise server.lost(error) from error
    if answered(answer, "moving"):
        print("Stages move to hosts that are back; requests go on once they have.")
    else:
        print("No stage moves: each is where it belongs, or its host is not back.")


# ------------------------------------------------------------------------------------------------------------- replicas
# The work of ``penstock replicas``.

RESTART_SECONDS: Final = 3600.0
"""Seconds that an engine may take to end and to start again, for which its weights are read anew."""


def replicas(server: Server, drain: int | None, restart: int | None, roll: bool) -> None:
    """Drain or restart engines of the server, then print the state of each.

    Raises ServerError if it does not answer, or refuses.
    """
    try:
        with httpx.Client(**server.client_options | {"timeout": RESTART_SECONDS}) as client:
            engines = loads(server, client)
            deeds = [(drain, "drain")] if drain is not None else []
            deeds += [(restart, "restart")] if restart is not None else []
            # One after the other: each answer comes when the engine is up again, so that the others keep serving.
            deeds += [(one["engine"], "restart") for one in engines if roll]
            for number, deed in deeds:
                answer = client.post(f"{server.root}/replicas/{number}/{deed}", json={})
                if not answer.is_success:
                    raise refused(answer)
            for one in loads(server, client):
                reason = f" ({one['reason']})" if one["reason"] else ""
                counts = f"{one['running']} running, {one['waiting']} waiting, {one['moved']} moved"
                print(f"engine {one['engine']}: {one['state']}{reason}, {counts}, {one['restarts']} restarts")
    except httpx.HTTPError as error:
        raise server.lost(error) from error


def loads(server: Server, client: httpx.Client) -> list[dict[str, Any]]:
    """The engines of a server, each as its path ``/load`` describes it. Raises ServerError if it refuses."""
    found: list[dict[str, Any]] = answered(client.get(f"{server.root}/load"), "engines")
    return found

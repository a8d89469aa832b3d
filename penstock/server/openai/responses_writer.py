"""``/v1/responses``: the route, and its replies as one object or as events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.server.http.errors import ApiError
from penstock.server.http.middleware import record_of
from penstock.server.openai.chat import start_chat
from penstock.server.openai.generation import Service, Summary, metrics_of, usage_of
from penstock.server.openai.protocol import FinishWord, generation_responses
from penstock.server.openai.reply import ChoiceDelta, reply_of
from penstock.server.openai.responses import (
    NAMES,
    Event,
    Incomplete,
    InputDetails,
    NamedFunction,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
    as_chat,
    in_own_words,
)
from penstock.server.openai.tools import ToolCallDelta

# --------------------------------------------------------------------------------------------------------------- writer
# The writer of /v1/responses: a choice as one object, or as the events of its items, one item after the other.


class ResponseWriter:
    """The writer of one response. It keeps the items so far, because the event at an item's end holds all of it."""

    named_events = True
    continues_text = False

    def __init__(self, body: ResponsesRequest, request_id: str, model: str) -> None:
        self._body = body
        self._request_id, self._model, self._created = request_id, model, int(time.time())
        self._items: list[OutputItem] = []
        self._open = False
        """Whether the last item may still grow."""
        self._finish: FinishWord | None = None
        self._warning: str | None = None
        self._events = 0

    def whole(self, choices: Sequence[ChoiceDelta], summary: Summary) -> ResponseObject:
        (choice,) = choices
        for _ in self.chunks(choice):  # this leaves the items as a stream would
            pass
        return self._response(summary)

    def chunks(self, delta: ChoiceDelta) -> Iterator[Event]:
        if delta.first:
            yield self._event("response.created", response=self._response())
            yield self._event("response.in_progress", response=self._response())
        if delta.reasoning:
            yield from self._more_thought(delta.reasoning)
        if delta.content:
            yield from self._more_text(delta.content)
        for call in delta.tool_calls:
            yield from self._more_of_call(call)
        if delta.finish_reason is not None:
            self._finish, self._warning = delta.finish_reason, delta.warning
            if not any(not isinstance(item, OutputReasoning) for item in self._items):
                yield from self._more_text("")
            yield from self._close()

    def last_chunks(self, summary: Summary) -> Iterator[Event]:
        response = self._response(summary)
        if self._warning is not None:
            response.warning = self._warning
        yield self._event(f"response.{response.status}", response=response)

    def failure(self, problem: ApiError) -> Event:
        response = self._response()
        response.status, response.output = "failed", self._items
        response.error = ResponseFailure(code=problem.code or "server_error", message=problem.detail)
        return self._event("response.failed", response=response)

    # ------------------------------------------------------------------------------------------------------ the items

    def _more_text(self, text: str) -> Iterator[Event]:
        """Events for more text of the answer; a message begins if none is open."""
        if not (self._open and isinstance(self._items[-1], OutputMessage)):
            yield from self._close()
            yield from self._begin_message()
        message = self._items[-1]
        assert isinstance(message, OutputMessage)
        message.content[0].text += text
        if text:
            yield self._event("response.output_text.delta", **self._place(content=True), delta=text, logprobs=[])

    def _begin_message(self) -> Iterator[Event]:
        """Events for the beginning of a message."""
        item = OutputMessage(id=self._id("msg"), type="message", role="assistant", status="in_progress", content=[])
        yield self._begin(item)
        # The content comes behind the item's event, which shows it empty.
        item.content = [OutputText(type="output_text", text="", annotations=[])]
        yield self._event("response.content_part.added", **self._place(content=True), part=item.content[0].model_copy())

    def _more_thought(self, text: str) -> Iterator[Event]:
        """Events for more reasoning."""
        if not (self._open and isinstance(self._items[-1], OutputReasoning)):
            yield from self._close()
            item = OutputReasoning(id=self._id("rs"), type="reasoning", status="in_progress", summary=[], content=[])
            yield self._begin(item)
            item.content = [ReasoningText(type="reasoning_text", text="")]
            part = item.content[0].model_copy()
            yield self._event("response.content_part.added", **self._place(content=True), part=part)
        thought = self._items[-1]
        assert isinstance(thought, OutputReasoning)
        thought.content[0].text += text
        yield self._event("response.reasoning_text.delta", **self._place(content=True), delta=text)

    def _more_of_call(self, call: ToolCallDelta) -> Iterator[Event]:
        """Events for a call's beginning, or for more of its arguments."""
        if call.name:
            yield from self._close()
            yield self._begin(
                OutputCall(
                    id=self._id("fc"),
                    type="function_call",
                    status="in_progress",
                    call_id=call.id,
                    name=call.name,
                    arguments="",
                )
            )
        current = self._items[-1]
        assert isinstance(current, OutputCall)
        current.arguments += call.arguments
        if call.arguments:
            yield self._event("response.function_call_arguments.delta", **self._place(), delta=call.arguments)

    def _begin(self, item: OutputItem) -> Event:
        """The event of a new item."""
        self._items.append(item)
        self._open = True
        # A copy, because the item itself grows after this event.
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item.model_copy())

    def _close(self) -> Iterator[Event]:
        """Events for the end of the last item, which is complete."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        if isinstance(item, OutputMessage):
            (part,), place = item.content, self._place(content=True)
            yield self._event("response.output_text.done", **place, text=part.text, logprobs=[])
            yield self._event("response.content_part.done", **place, part=part.model_copy())
        elif isinstance(item, OutputReasoning):
            (thought,), place = item.content, self._place(content=True)
            yield self._event("response.reasoning_text.done", **place, text=thought.text)
            yield self._event("response.content_part.done", **place, part=thought.model_copy())
        else:
            yield self._event(
                "response.function_call_arguments.done", **self._place(), name=item.name, arguments=item.arguments
            )
        item.status = self._status
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item.model_copy())

    def _place(self, *, content: bool = False) -> dict[str, Any]:
        """The fields of an event that say to which item it belongs."""
        place = {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}
        return place | {"content_index": 0} if content else place

    @property
    def _status(self) -> Status:
        """The status of the response and of its last item."""
        return "completed" if self._finish in ("stop", "tool_calls") else "incomplete"

    # --------------------------------------------------------------------------------------------------- the response

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event with the next number."""
        self._events += 1
        return Event(type=kind, sequence_number=self._events - 1, **fields)

    def _response(self, summary: Summary | None = None) -> ResponseObject:
        """The response so far; with ``summary`` as it is at the end."""
        body, cut = self._body, summary is not None and self._finish == "length"
        choice = body.tool_choice
        return ResponseObject(
            id=self._id("resp", numbered=False),
            object="response",
            created_at=self._created,
            status="in_progress" if summary is None else self._status,
            error=None,
            incomplete_details=Incomplete(reason="max_output_tokens") if cut else None,
            model=self._model,
            output=[item.model_copy() for item in self._items] if summary is not None else [],
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            tools=[tool.model_dump() for tool in body.tools or ()],
            tool_choice=choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            metadata=body.metadata,
            store=False,
            usage=None if summary is None else response_usage(summary),
            metrics=None if summary is None else metrics_of(summary),
        )

    def _id(self, kind: str, *, numbered: bool = True) -> str:
        """An id made of the request's; items are numbered."""
        return f"{kind}_{self._request_id}" + (f"_{len(self._items)}" if numbered else "")


def response_usage(summary: Summary) -> ResponseUsage:
    """A generation's tokens in the form of /v1/responses."""
    usage = usage_of(summary)
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=0),
        total_tokens=usage.total_tokens,
    )


# --------------------------------------------------------------------------------------------------------------- routes
# ``/v1/responses``.


def responses_router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["generation"])
    told = generation_responses("event of OpenAI's Responses API")

    @routes.post("/v1/responses", response_model=ResponseObject, responses=told)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, in the words of OpenAI's Responses API. Nothing is kept."""
        chat = as_chat(body)
        with in_own_words():
            begun = await start_chat(service, chat, request, NAMES)
            writer = ResponseWriter(body, record_of(request).request_id, service.model)
            return await reply_of(begun.generation, begun.choices, writer, service.prompts.tokenizer)

    @routes.api_route("/v1/responses/{name:path}", methods=["GET", "DELETE", "POST"], include_in_schema=False)
    async def kept_response(name: str) -> None:
        raise ApiError(404, f"there is no response {name!r}: none is kept here", code="unsupported")

    return routes

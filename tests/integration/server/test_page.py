"""The web page in a real Chromium, over a real server on emulated devices: slow enough to be watched."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

from penstock.cluster import load_cluster
from penstock.engine.stats import EngineStats
from penstock.lab.plan_choices import cluster_toml
from tests.checkpoints import make_checkpoint

CHROMIUM = shutil.which("chromium")
"""Where there is no such command, Playwright starts what ``playwright install chromium`` has brought."""
pytestmark = [pytest.mark.page, pytest.mark.processes, pytest.mark.slow]
PENSTOCK = str(Path(sys.executable).parent / "penstock")
KEY = "key-of-this-test"
PROMPT = "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n"
PATIENCE_MS = 90_000


@contextmanager
def serving(*flags: str, port: int = 0, model: str = "demo") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server, on a free port if none is named: its address and its process, which is told to end if it has not."""
    command = [PENSTOCK, "serve", model, "--port", f"{port}", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, "the server did not start"
            yield found.group(), process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving("--cluster", "demo", "--draft-model", "demo", "--strategy", "pipedec", "--api-key", KEY) as (url, _):
        yield url


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose chat template reads thoughts."""
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text("{# <think> </think> #}{% for turn in messages %}{{ turn.content }}\n{% endfor %}")
    with serving("--chat-template", str(template)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield launched
        launched.close()


class Visitor:
    """A page with a key in its own browsing context, and what it did that it should not have."""

    def __init__(self, browser: Browser, url: str, key: str | None, **options: Any) -> None:
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE_MS)
        self.page: Page = context.new_page()
        if key is not None:
            self.page.add_init_script(
                f"sessionStorage.getItem('penstock-key') ?? sessionStorage.setItem('penstock-key', '{key}')"
            )
        self.url = url
        self.allowed = ""
        """Pattern of errors that this visit is about."""
        self.errors: list[str] = []
        self.requested: list[str] = []
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(url)

    def complete(self, text: str = PROMPT, max_tokens: int = 24) -> None:
        """Have a text continued, with a seed after which it does not end soon."""
        self.page.get_by_role("radio", name="Complete").check()
        self.set(max_tokens=max_tokens, seed=4, temperature=0.7)
        self.page.locator("#prompt").fill(text)
        self.page.locator("#prompt").press("Enter")

    def set(self, **values: float | str) -> None:
        settings = self.page.locator("#settings")
        if settings.get_attribute("open") is None:
            self.page.locator("#settings summary").click()
        for name, value in values.items():
            self.page.locator(f"[name={name}]").fill(str(value))

    def wait_for_text(self) -> None:
        """Wait until an answer has some text."""
        expect(self.page.locator(".writing .text")).to_have_text(re.compile(r"\S"), timeout=PATIENCE_MS)

    def wait_for_end(self) -> None:
        expect(self.page.locator("#send")).to_be_visible(timeout=PATIENCE_MS)
        expect(self.page.locator("#state")).to_have_text("idle", timeout=PATIENCE_MS)

    def leave(self) -> None:
        """Close the page. Nothing went wrong on it but what is ``allowed``, and nothing left its origin."""
        self.page.context.close()
        assert [error for error in self.errors if not (self.allowed and re.search(self.allowed, error))] == []
        assert [url for url in self.requested if not url.startswith(self.url)] == []


class Visit(Protocol):
    def __call__(self, url: str = "", key: str | None = KEY, **options: Any) -> Visitor: ...


@pytest.fixture
def visit(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """Opens the page, of the shared server unless another is named; leaves it in the end."""
    visitors: list[Visitor] = []

    def visit(url: str = "", key: str | None = KEY, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, url or request.getfixturevalue("server"), key, **options))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.leave()


def test_a_text_streams_while_the_engine_is_seen_at_work(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    expect(page.locator("#model")).to_have_text("demo")
    expect(page.locator("#state")).to_have_text("idle")
    assert painted(page, "#flow", "--committed") == 0
    visitor.complete(max_tokens=120)
    wait_for_paint(page, "#pipeline", "--speculated")
    expect(page.locator("#state")).to_have_text("working")
    expect(page.locator("#tree .node.in-flight text").first).to_be_visible()
    expect(page.locator("#tree .node.committed").first).to_be_visible()
    expect(page.locator("#pipeline")).to_have_attribute("aria-label", re.compile(r"in stage [0-3]"))
    expect(page.locator("#speed")).to_have_text(re.compile(r"\d+\.\d"))
    visitor.wait_for_end()
    assert painted(page, "#flow", "--committed") > 0
    expect(page.locator(".note")).to_contain_text("120 tokens")
    expect(page.locator(".note")).to_contain_text("acceptance length")
    row = page.locator("#requests tr").first
    expect(row).to_contain_text("yours")
    expect(row).to_contain_text("length")
    assert "%" in page.locator("#hits").inner_text()


@pytest.fixture(scope="module")
def two_engines() -> Iterator[str]:
    with serving("--cluster", "demo", "--data-parallel-size", "2") as (url, _):
        yield url


def test_a_stream_moves_from_one_engines_row_to_another(visit: Visit, two_engines: str) -> None:
    visitor = visit(two_engines, key=None)
    page = visitor.page
    rows = page.locator("#engines li")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("up")
    expect(rows.nth(1).locator(".stage")).to_have_count(4)
    visitor.complete(max_tokens=200)
    visitor.wait_for_text()
    home = page.locator("#engines li", has=page.locator(".request.own")).get_attribute("data-engine")
    assert home is not None
    for deed, state in (("drain", "draining"), ("restart", "up")):
        done = page.request.post(f"{two_engines}/replicas/{home}/{deed}", data={}, timeout=PATIENCE_MS)
        assert done.ok
        expect(rows.nth(int(home)).locator(".state")).to_have_text(state, timeout=PATIENCE_MS)
        if deed == "drain":
            expect(rows.nth(1 - int(home)).locator(".request.own.moved")).to_be_visible()
            expect(rows.nth(int(home)).locator(".request")).to_have_count(0)
            expect(rows.nth(int(home))).to_contain_text("1 moved away")
            visitor.wait_for_end()
            expect(page.locator(".note")).to_contain_text("200 tokens")
    expect(rows.nth(int(home))).to_contain_text("restarted 1 time")


def test_one_engine_has_no_rows(visit: Visit) -> None:
    page = visit().page
    expect(page.locator("#state")).to_have_text("idle")
    expect(page.locator("#engines-panel")).to_be_hidden()


PAINTED = """([canvas, colour]) => {
  const value = getComputedStyle(document.documentElement).getPropertyValue(colour).trim();
  const [r, g, b] = value.match(/\\d+/g).map(Number);
  const picture = document.querySelector(canvas);
  const copy = new OffscreenCanvas(picture.width, picture.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(picture, 0, 0);
  const { data } = copy.getImageData(0, 0, picture.width, picture.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] === 255 && data[i] === r && data[i + 1] === g && data[i + 2] === b) found++;
  return found;
}"""


def painted(page: Page, canvas: str, colour: str) -> int:
    """How many of a canvas's pixels have one of the style sheet's colours."""
    count = page.evaluate(PAINTED, [canvas, colour])
    assert isinstance(count, int)
    return count


def wait_for_paint(page: Page, canvas: str, colour: str) -> None:
    """Ask until a canvas has the colour.

    Playwright's `wait_for_function` asks again from inside the page, where the content security policy forbids `eval`.
    """
    ends_at = time.monotonic() + PATIENCE_MS / 1e3
    while not painted(page, canvas, colour):
        assert time.monotonic() < ends_at, f"{canvas} has no {colour}"
        page.wait_for_timeout(5)


def test_stop_ends_the_request_and_keeps_what_there_is(visit: Visit) -> None:
    visitor = visit()
    visitor.complete(max_tokens=400)
    visitor.wait_for_text()
    visitor.page.get_by_role("button", name="Stop").click()
    visitor.wait_for_end()
    expect(visitor.page.locator(".note")).to_have_text("stopped")
    expect(visitor.page.locator("#requests tr").first).to_contain_text("abort")
    assert visitor.page.locator(".body").inner_text().startswith("class Stack:")


def test_a_conversation_sends_its_turns_and_the_system_prompt(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.set(max_tokens=4, temperature=0)
    page.locator("[name=system]").fill("# Python")
    sent = []
    for text in ("def area(r):", "def length(r):"):
        page.locator("#prompt").fill(text)
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_role("button", name="Send").click()
        sent.append(request.value.post_data_json)
        visitor.wait_for_end()
    answer = page.locator(".message .body").nth(1).inner_text()
    first = [{"role": "system", "content": "# Python"}, {"role": "user", "content": "def area(r):"}]
    assert sent[0]["messages"] == first
    assert sent[1]["messages"][:2] == first
    assert sent[1]["messages"][2]["content"].strip() == answer.strip()
    assert (sent[1]["max_tokens"], sent[1]["temperature"], sent[1]["stream"]) == (4, 0, True)
    assert "seed" not in sent[1], "an empty field leaves the default to the server"
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)


def test_thoughts_stand_apart_and_are_not_sent_back(visit: Visit, thinking: str) -> None:
    """The demo model would never think: a grammar puts the words into its mouth."""
    visitor = visit(thinking, key=None, permissions=["clipboard-read", "clipboard-write"])
    page = visitor.page

    def says(route: Route) -> None:
        words = {"guided_choice": ["<think>\nIs it <b>é</b>?\n</think>\n\nIt is."]}
        route.continue_(post_data=json.dumps(route.request.post_data_json | words))

    page.route("**/v1/chat/completions", says)
    sent = []
    for _ in range(2):
        page.locator("#prompt").fill("def area(r):")
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_role("button", name="Send").click()
        sent.append(request.value.post_data_json)
        visitor.wait_for_end()
    answer = page.locator(".message").nth(1)
    thoughts = answer.locator("details.thoughts")
    expect(answer.locator(".text")).to_have_text("It is.")
    expect(thoughts.locator(".body")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator(".body")).to_have_text("Is it <b>é</b>?")
    answer.get_by_role("button", name="Copy").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").strip() == "It is."
    assert [turn["content"].strip() for turn in sent[1]["messages"][:2]] == ["def area(r):", "It is."]


def test_a_text_is_copied_and_continued(visit: Visit) -> None:
    visitor = visit(permissions=["clipboard-read", "clipboard-write"])
    page = visitor.page
    visitor.complete(max_tokens=4)
    visitor.wait_for_end()
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(PROMPT)
    assert len(copied) > len(PROMPT)
    with page.expect_request("**/v1/completions") as request:
        page.get_by_role("button", name="Continue").click()
    assert request.value.post_data_json["prompt"] == copied
    visitor.wait_for_end()


def test_what_the_server_refuses_is_said_and_the_text_is_kept(visit: Visit) -> None:
    """Without the schema the page leaves every check to the server."""
    visitor = visit()
    page = visitor.page
    page.route("**/openapi.json", lambda route: route.abort())
    page.reload()
    expect(page.locator("#model")).to_have_text("demo")
    visitor.set(top_p=7)
    page.locator("#prompt").fill("def area(r):")
    page.locator("#prompt").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("top_p is 7")
    expect(page.locator("#prompt")).to_have_value("def area(r):")
    expect(page.locator(".message")).to_have_count(0)
    visitor.allowed = "400|ERR_FAILED"


def test_the_button_sends_settings_between_the_steps_and_what_is_no_number_is_said(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.set(max_tokens=4, temperature=0.75)
    expect(page.locator("#sampling")).to_have_text("temperature 0.75")
    page.locator("#settings summary").click()
    page.locator("#prompt").fill("def area(r):")
    with page.expect_request("**/v1/chat/completions") as request:
        page.get_by_role("button", name="Send").click()
    assert request.value.post_data_json["temperature"] == 0.75
    visitor.wait_for_end()
    visitor.set(temperature="")
    page.locator("[name=temperature]").press_sequentially("--3e")
    page.locator("#prompt").fill("def length(r):")
    page.locator("#prompt").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("temperature is not a number")
    expect(page.locator("#prompt")).to_have_value("def length(r):")
    visitor.set(temperature=0)
    page.locator("#prompt").press("Enter")
    visitor.wait_for_end()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_chat_and_text_are_both_there_after_a_look_at_the_other(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.set(max_tokens=4)
    page.locator("#prompt").fill("def area(r):")
    page.locator("#prompt").press("Enter")
    visitor.wait_for_end()
    visitor.complete(max_tokens=4)
    visitor.wait_for_end()
    expect(page.locator(".who h3")).to_have_text(["Text"])
    page.get_by_role("radio", name="Chat").check()
    expect(page.locator(".who h3")).to_have_text(["You", "demo"])
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#empty")).to_be_visible()
    page.get_by_role("radio", name="Complete").check()
    expect(page.locator(".who h3")).to_have_text(["Text"])


@pytest.mark.parametrize(
    ("answer", "raw", "shown"),
    [
        ("\n    # twice\n    return 2 * r\n", True, "    # twice\n    return 2 * r\n"),
        ("It is the area.\n", False, "It is the area.\n"),
        ("So:\n```python\nif r:\n    r = 0\n```\n", False, "So:if r:\n    r = 0"),
    ],
)
def test_source_code_looks_like_code_and_words_like_words(visit: Visit, answer: str, raw: bool, shown: str) -> None:
    """The answers are scripted: the demo model writes nothing but code."""
    message = answered(visit(), answer)
    assert message.locator(".text").evaluate("(element) => element.textContent") == shown
    family = message.locator(".body").evaluate("(element) => getComputedStyle(element).fontFamily")
    assert ("monospace" in family) is raw


def answered(visitor: Visitor, answer: str) -> Locator:
    """The message that shows this answer, streamed in small pieces to a question."""
    page = visitor.page
    pieces = [answer[at : at + 7] for at in range(0, len(answer), 7)]
    chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.locator("#prompt").fill("What is it?")
    page.locator("#prompt").press("Enter")
    message = page.locator(".message").nth(1)
    expect(message).not_to_have_class(re.compile("writing"))
    return message


MARKDOWN = """\
# Turbines

A **water wheel** is *old*, see `wheel.c` and [more](https://example.org/a_b).
<img src=x onerror=alert(1)>

2. First
   - half
     ```
     - no item
     ```
3. Second

   goes on

> quoted

- - - - - - - - - - - - deep
"""
HTML = """\
<h4 data-level="1">Turbines</h4>\
<p>A <strong>water wheel</strong> is <em>old</em>, see <code>wheel.c</code> and \
<a href="https://example.org/a_b" target="_blank" rel="noopener noreferrer">more</a>.
&lt;img src=x onerror=alert(1)&gt;</p>\
<ol start="2"><li>First<ul><li>half<pre><code>- no item</code></pre></li></ul></li><li>Second<p>goes on</p></li></ol>\
<blockquote><p>quoted</p></blockquote>\
"""


CHAT_TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}assistant: "


def test_points_grow_side_by_side_and_end_below_each_other(visit: Visit, tmp_path: Path) -> None:
    """A model of random weights: the grammar alone makes its outline one."""
    folder = make_checkpoint(tmp_path / "model", tokenizer=True, max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (cluster := tmp_path / "fast.toml").write_text(cluster_toml(load_cluster("demo", time_scale=0.1)))
    with serving("--cluster", str(cluster), model=str(folder)) as (url, _):
        visitor = visit(url, key=None)
        page = visitor.page
        visitor.set(max_tokens=240, temperature=0)
        page.locator("[name=outline_decoding]").select_option("on")
        page.locator("#prompt").fill("What turns the wheel?")
        page.locator("#prompt").press("Enter")
        cells = page.locator(".writing .points section")
        expect(page.locator(".point").filter(has_text=re.compile(r"\S")).nth(1)).to_be_attached(timeout=PATIENCE_MS)
        titles = cells.locator("h4").all_text_contents()
        first, second = (cells.nth(i).bounding_box() for i in range(2))
        visitor.wait_for_end()
        assert first is not None
        assert second is not None
        assert first["y"] == second["y"]
        assert first["x"] + first["width"] < second["x"]
        assert page.locator(".points.told h4").all_text_contents() == titles
        tops = [box["y"] for box in map(Locator.bounding_box, page.locator(".points.told section").all()) if box]
        assert len(set(tops)) == len(titles)
        decision = page.locator(".message").nth(1).locator(".decision")
        expect(decision).to_contain_text('not the plain answer. Why: outline_decoding is "on"')
        decision.get_by_role("button", name="Answer plainly instead").click()
        visitor.wait_for_end()
        expect(page.locator(".message")).to_have_count(2)
        expect(page.locator(".points")).to_have_count(0)


def test_markdown_is_rendered_and_is_never_the_pages_markup(visit: Visit) -> None:
    text = answered(visit(), MARKDOWN).locator(".text")
    shown = text.evaluate("(element) => element.innerHTML")
    assert shown.startswith(HTML)
    assert shown.count("<ul>") == 9, "lists deeper than eight stay text"
    assert text.locator("li").last.inner_text().startswith("- - -")


def test_buttons_of_a_message_are_quiet_until_wanted(visit: Visit) -> None:
    message = answered(visit(), "It is the area.")
    tools = message.locator(".tools")
    expect(tools).to_have_css("opacity", "0")
    message.hover()
    expect(tools).to_have_css("opacity", "1")


def test_the_panels_keep_their_height_and_say_when_their_figures_are_from(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    expect(page.locator("#running")).to_have_text("0")
    before = places(page)
    expect(page.locator("#tree-panel")).not_to_have_attribute("open", "")
    visitor.complete(max_tokens=30)
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#as-of")).to_have_text("Figures of the last three seconds")
    expect(page.locator("#tree-panel")).to_have_attribute("open", "")
    expect(page.locator("#tree .node.pruned").first).to_be_attached()
    visitor.wait_for_end()
    expect(page.locator("#as-of")).to_have_text(re.compile(r"^Idle; figures from \d\d:\d\d:\d\d$"))
    expect(page.locator("#tree-note")).to_have_text(re.compile(r"^the last one, from \d\d:\d\d:\d\d$"))
    expect(page.locator("#speed")).to_have_text(re.compile(r"\d"))
    page.locator("#tree-panel summary").click()
    assert places(page) == before


def places(page: Page) -> list[tuple[float, float]]:
    """Top and height of every panel but the one that folds."""
    boxes = [panel.bounding_box() for panel in page.locator("#now, #engine > :not(#tree-panel)").all()]
    return [(box["y"], box["height"]) for box in boxes if box is not None]


def test_a_long_request_leaves_the_other_bars_their_width(visit: Visit) -> None:
    """The frames are scripted: two requests of a second, and one of a minute."""
    visitor = visit()
    page = visitor.page
    expect(page.locator("#state")).to_have_text("idle")
    widths = page.evaluate(
        """async () => {
          const { Requests } = await import("./page/requests.js");
          const lengths = [1, 60, 1];
          const requests = lengths.map((seconds, number) => ({
            number, queued_at: 0, started_at: 0, first_token_at: 0, ended_at: seconds, tokens: 9, finish_reason: "stop",
          }));
          new Requests().frame({ at: 60, requests, own: [] });
          return [...document.querySelectorAll("#requests .stack")].map((bar) =>
            [bar.lastChild.getBoundingClientRect().width / bar.clientWidth, bar.classList.contains("cut")]);
        }"""
    )
    assert [cut for _, cut in widths] == [False, True, False]
    assert [round(width, 2) for width, _ in widths] == [0.25, 1, 0.25]


def test_the_newest_guesses_are_in_sight_at_any_speed(visit: Visit) -> None:
    """The frames are scripted: the text jumps ahead by 30 tokens, then by one, with a tree deeper than the picture."""
    visitor = visit(viewport={"width": 360, "height": 740})
    page = visitor.page
    expect(page.locator("#state")).to_have_text("idle")
    seen = page.evaluate(
        """async () => {
          const { Tree } = await import("./page/tree.js");
          const tree = new Tree();
          const frame = document.querySelector("#tree-frame");
          document.querySelector("#tree-panel").open = true;
          const found = [];
          for (const [position, depth] of [[10, 2], [40, 3], [41, 3], [42, 12], [45, 1], [46, 12]]) {
            const path = [{ node: 100 * position, hit: true, text: "a" }];
            const leaves = Array.from({ length: depth }, (_, i) => ({
              node: 100 * position + i + 1, parent: 100 * position + i, depth: i + 1,
              state: "drafted", text: `n${i + 1}`,
            }));
            tree.frame({ tree: { request: 1, own: true, root: 100 * position, position, size: depth, path, leaves } });
            const pills = [...document.querySelectorAll("#tree .node:not(.pruned) text")];
            const { left, right } = pills.find((one) => one.textContent === `n${depth}`).getBoundingClientRect();
            const box = frame.getBoundingClientRect();
            found.push(box.width > 0 && left >= box.left && right <= box.right);
          }
          return found;
        }"""
    )
    assert seen == [True] * 6


def test_fields_are_checked_as_the_api_does_before_anything_is_sent(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    expect(page.locator("#model")).to_have_text("demo")
    wrong = page.locator("#wrong")
    for values, words in (
        ({"top_p": 0}, "top_p is 0; it has to be above 0 and at most 1"),
        ({"top_p": 1, "temperature": -1}, "temperature is -1; it has to be at least 0"),
        ({"temperature": 9, "top_k": 1.5}, "top_k is 1.5; it has to be a whole number"),
        ({"top_k": -2}, "top_k is -2; it has to be at least -1 and below 2147483648"),
        ({"top_k": -1, "max_tokens": 99999}, "max_tokens is 99999; it has to be at least 1 and at most 2048"),
        (
            {"max_tokens": 9, "seed": 2**60},
            "seed is 1152921504606846976; a browser sends whole numbers exactly only up",
        ),
    ):
        visitor.set(**values)
        expect(wrong).to_contain_text(words)
    page.locator("#prompt").fill("def area(r):")
    page.locator("#prompt").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("seed is 1152921504606846976")
    expect(page.locator("#prompt")).to_have_value("def area(r):")
    assert not [url for url in visitor.requested if url.endswith("/completions")]
    visitor.set(seed=-4)
    expect(wrong).to_be_hidden()


def asked(page: Page, text: str, answer: str, **end: Any) -> None:
    """Ask in a chat; the answer and its last chunk, with ``end``'s fields, are scripted."""
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"content": answer}}]}]
    reason = end.pop("finish_reason", "stop")
    chunks += [{"choices": [{"delta": {}, "finish_reason": reason}]}, {"choices": [], **end}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    message = page.locator(".message").last
    expect(message.locator(".text")).to_contain_text(answer.split()[-1])
    expect(message).not_to_have_class(re.compile("writing"))


def test_an_answer_says_its_gain_and_why_it_was_cut_with_the_way_on(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    usage = {"prompt_tokens": 9, "completion_tokens": 64}
    metrics = {"speed_up": 1.84, "num_drafts": 0}
    asked(page, "one", "First.", finish_reason="length", usage=usage, metrics=metrics)
    answer = page.locator(".message").last
    expect(answer.locator(".note")).to_contain_text("1.8 times plain")
    expect(answer.locator(".meaning")).to_contain_text("the one that plain decoding gives, token for token.")
    expect(answer.locator(".end")).to_contain_text("Cut at 64 tokens;")
    page.unroute_all()
    with page.expect_request("**/v1/chat/completions") as request:
        answer.get_by_role("button", name="Answer with up to 128 tokens").click()
    assert request.value.post_data_json["max_tokens"] == 128
    assert request.value.post_data_json["messages"][-1] == {"role": "user", "content": "one"}
    page.keyboard.press("Escape")
    visitor.wait_for_end()
    page.get_by_role("button", name="New chat").click()
    full = {"prompt_tokens": 2024, "completion_tokens": 24}
    asked(page, "two", "Second.", finish_reason="length", usage=full, metrics=metrics)
    expect(page.locator(".meaning")).to_have_count(0)
    expect(page.locator(".end").last).to_contain_text("The context is full: 2048 tokens;")
    page.locator(".end").last.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    asked(page, "three", "Third.", usage=usage)
    expect(page.locator(".end").last).to_be_hidden()


def test_chats_outlive_a_reload_until_they_are_forgotten(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    asked(page, "one", "- *First*\n- 1")
    asked(page, "and?", "Second.", finish_reason="length", usage={"prompt_tokens": 9, "completion_tokens": 3})
    page.reload()
    expect(page.locator(".who h3")).to_have_text(["You", "demo", "You", "demo"])
    expect(page.locator(".message li em")).to_have_text("First")
    expect(page.locator(".end").last).to_contain_text("Cut at 3 tokens;")
    expect(page.get_by_role("button", name=re.compile("^Answer with up to"))).to_have_text("Answer with up to 6 tokens")
    with page.expect_request("**/v1/chat/completions") as request:
        page.locator("#prompt").fill("more")
        page.locator("#prompt").press("Enter")
    said = ["one", "- *First*\n- 1", "and?", "Second.", "more"]
    assert [turn["content"] for turn in request.value.post_data_json["messages"]] == said
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    page.locator("#earlier").select_option("one")
    expect(page.locator(".who h3").first).to_have_text("You")
    page.get_by_role("button", name="New chat").click()
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#settings summary").click()
    page.get_by_role("button", name="Forget all chats").click()
    expect(page.locator("#earlier")).to_be_hidden()
    page.reload()
    expect(page.locator("#state")).to_have_text("idle")
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('penstock-chat-'))") == []


def test_what_came_of_an_answer_before_a_reload_is_kept(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    visitor.complete(max_tokens=400)
    visitor.wait_for_text()
    page.reload()
    expect(page.locator(".body")).to_contain_text(PROMPT.splitlines()[0])
    expect(page.locator(".note")).to_have_text("cut off: the page was left")
    visitor.wait_for_end()


def test_kept_chats_have_a_bound(visit: Visit) -> None:
    """The oldest make room; an answer goes with its question."""
    page = visit().page
    expect(page.locator("#model")).to_have_text("demo")
    kept = page.evaluate(
        """async () => {
          const { Talk, keptTalks } = await import("./page/talks.js");
          const said = (role, text) => ({ author: role === "user" ? "You" : "demo", role, text });
          for (let i = 0; i < 40; i++) new Talk("chat", { id: `${i}`, messages: [said("user", `chat ${i}`)] }).keep();
          const many = keptTalks().length;
          const roles = ["user", "assistant", "user", "assistant"];
          const messages = roles.map((role, i) => said(role, "abcd"[i].repeat(400_000)));
          new Talk("chat", { id: "long", messages }).keep();
          const first = keptTalks()[0].messages.map(({ role, text }) => role + text[0]);
          return [many, first, keptTalks().reduce((sum, { size }) => sum + size, 0) <= 1_000_000];
        }"""
    )
    assert kept == [30, ["userc", "assistantd"], True]


def test_hosts_and_a_recovery_have_their_place(visit: Visit) -> None:
    """The server's statements about its engine are scripted."""
    visitor = visit()
    page = visitor.page
    stages = [{"name": "", "host": host, "first": i, "last": i + 1} for i, host in enumerate(("", "10.0.0.2"))]
    setup = {"run": "r", "stages": stages, "strategy": "auto", "drafter": "ngram", "emulated": None}
    stats = dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {
        "recovering": "stage 1 was lost",
        "ended": None,
        "last_step_seconds_ago": None,
        "stage_busy_seconds": [0, 0],
    }
    frame = {"at": 0, "stats": stats, "flying": [], "passed": [], "tree": None, "requests": [], "own": []}
    told = "".join(
        f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in (("setup", setup), ("frame", frame))
    )
    page.route("**/live", lambda route: route.fulfill(content_type="text/event-stream", body=told))
    page.reload()
    expect(page.locator("#setup")).to_have_text("2 stages on 2 hosts · auto strategy, ngram drafter")
    expect(page.locator("#as-of")).to_have_text("Recovering, then requests go on: stage 1 was lost")


def test_a_key_is_asked_for_until_it_is_right(visit: Visit) -> None:
    visitor = visit(key=None)
    page = visitor.page
    field = page.get_by_role("dialog").get_by_label("Key")
    for refused, key in ((False, "wrong"), (True, KEY)):
        expect(field).to_have_value("")
        expect(page.get_by_text("That key is not one of this server's.")).to_be_visible(visible=refused)
        field.fill(key)
        page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("demo")
    expect(page.locator("#state")).to_have_text("idle")
    visitor.allowed = "401"


def test_others_see_the_shape_of_a_tree_and_none_of_its_words(visit: Visit) -> None:
    writer, other = visit(), visit()
    writer.complete(max_tokens=400)
    writer.wait_for_text()
    expect(other.page.locator("#tree .node.in-flight").first).to_be_visible()
    expect(other.page.locator("#tree-note")).to_contain_text("another request")
    expect(other.page.locator("#requests tr").first).not_to_contain_text("yours")
    assert other.page.locator("#tree text").count() == 0
    expect(writer.page.locator("#tree text").first).to_be_visible()
    writer.page.keyboard.press("Escape")
    writer.wait_for_end()


def test_the_keyboard_alone_is_enough(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    page.evaluate("localStorage.setItem('penstock-settings', JSON.stringify({ seed: '4' }))")  # does not end soon
    page.reload()
    expect(page.locator("#model")).to_have_text("demo")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    order = []
    for _ in range(6):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
        assert page.evaluate(HAS_VISIBLE_FOCUS), f"nothing shows that {order[-1]} has the focus"
    assert order == ["theme", "mode", "new", "log", "prompt", "send"]
    page.keyboard.press("Shift+Tab")
    page.keyboard.type("def area(r):")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("    return")
    expect(page.locator("#prompt")).to_have_value("def area(r):\n    return")
    page.keyboard.press("Enter")
    visitor.wait_for_text()
    page.keyboard.press("Tab")
    expect(page.locator("#stop")).to_be_focused()
    page.keyboard.press("Enter")
    visitor.wait_for_end()
    expect(page.locator("#prompt")).to_be_focused()


HAS_VISIBLE_FOCUS = """() => {
  const focused = document.activeElement;
  const style = getComputedStyle(focused.type === "radio" ? focused.nextElementSibling : focused);
  return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
}"""


def test_a_phone_shows_everything_without_scrolling_sideways(visit: Visit) -> None:
    visitor = visit(viewport={"width": 360, "height": 740}, has_touch=True)
    page = visitor.page
    expect(page.locator("#state")).to_have_text("idle")
    assert page.evaluate(WIDEST) <= 360
    visitor.complete(text=PROMPT + "x" * 200, max_tokens=60)
    visitor.wait_for_text()
    expect(page.locator("#tree .node").first).to_be_attached()
    assert page.evaluate(WIDEST) <= 360
    boxes = [page.locator(name).bounding_box() for name in ("#now", "#chat", "#engine")]
    ends = [(box["y"], box["y"] + box["height"]) for box in boxes if box is not None]
    assert len(ends) == 3
    assert all(above[1] <= below[0] for above, below in pairwise(ends)), "the engine's state comes first"
    visitor.wait_for_end()


WIDEST = """() => Math.max(document.documentElement.scrollWidth, ...[...document.querySelectorAll("header *, main *")]
  .filter((element) => !element.closest("svg, .hidden") && element.getClientRects().length)
  .map((element) => element.getBoundingClientRect().right))"""


def test_the_theme_follows_the_system_until_it_is_chosen(visit: Visit) -> None:
    visitor = visit(color_scheme="dark")
    page = visitor.page
    expect(page.locator("#state")).to_have_text("idle")
    assert brightness(page) < 60
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").focus()
    assert brightness(page) > 200
    page.reload()
    expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    assert brightness(page) > 200


def brightness(page: Page) -> float:
    """Mean of the page's background's red, green and blue, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3


def test_nothing_moves_for_who_wants_no_motion(visit: Visit) -> None:
    page = visit(reduced_motion="reduce").page
    assert page.evaluate("getComputedStyle(document.querySelector('.camera')).transitionDuration") == "0s"
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate("getComputedStyle(document.querySelector('.camera')).transitionDuration") != "0s"


def test_a_server_stops_and_the_page_says_so_until_it_is_there_again(visit: Visit) -> None:
    flags = ("-pp", "4", "--strategy", "autoregressive")
    with serving(*flags) as (url, process):
        visitor = visit(url, key=None)
        page = visitor.page
        expect(page.locator("#state")).to_have_text("idle")
        expect(page.locator("#setup")).to_contain_text("4 stages · no speculation")
        visitor.complete(max_tokens=4)
        visitor.wait_for_end()
        expect(page.locator("#requests tr")).to_contain_text("1 · yours")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        expect(page.locator("#state")).to_have_text(re.compile("ended|no connection"))
        expect(page.locator("#engine")).to_have_class("stale")
    visitor.allowed = "ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING"
    with serving(*flags, port=int(url.rpartition(":")[2])):
        expect(page.locator("#state")).to_have_text("idle", timeout=PATIENCE_MS)
        expect(page.locator("#engine")).not_to_have_class("stale")
        expect(page.locator("#requests")).to_have_text("None yet.")
        expect(page.locator(".body")).to_contain_text("class Stack:")
        visitor.complete(max_tokens=4)
        visitor.wait_for_end()
        expect(page.locator("#requests tr")).to_contain_text("1 · yours")


@contextmanager
def behind_a_proxy(url: str, prefix: str) -> Iterator[str]:
    """A proxy that takes ``prefix`` off every path and passes on what comes back as it comes: its address."""

    class Stripping(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path.startswith(prefix), self.path
            upstream = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_MS / 1e3)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            upstream.request(self.command, self.path.removeprefix(prefix), body, dict(self.headers))
            reply = upstream.getresponse()
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.getheader("Content-Type", ""))
            self.end_headers()
            with suppress(ConnectionError):  # the page has been left
                while piece := reply.read1():
                    self.wfile.write(piece)
            upstream.close()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stripping) as proxy:
        proxy.daemon_threads = True
        thread = Thread(target=proxy.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_port}{prefix}/"
        proxy.shutdown()
        thread.join()


def test_the_page_works_below_a_path_of_a_proxy(visit: Visit, server: str) -> None:
    with behind_a_proxy(server, "/llm") as url:
        visitor = visit(url)
        visitor.complete(max_tokens=60)
        visitor.wait_for_text()
        visitor.wait_for_end()
        expect(visitor.page.locator("#requests")).to_contain_text("yours")

"""Photograph the web page for docs/images: ``python scripts/page_shots.py`` (some minutes; needs Chromium).

A picture of the small chat model, drafted by itself, on four emulated boards. Three widths, both themes, over a server
of the demo pair on the same boards: idle and busy, a picture each; an answer that was cut, the page loaded again after
it, and a server out of reach, a sheet each.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

IMAGES: Final = Path(__file__).parent.parent / "docs" / "images"
COMMAND: Final = ("serve", "demo", "--cluster", "demo", "--draft-model", "demo", "--strategy", "pipedec")
CHAT: Final = ("serve", "smollm2", "--cluster", "demo", "--draft-model", "smollm2", "--strategy", "pipedec")
QUESTION: Final = "Write a Python class for a stack, with push and pop, and explain each method."
SIZES: Final = {"wide": (1440, 900), "tablet": (820, 1180), "phone": (390, 844)}
THEMES: Final = ("light", "dark")
PROMPT: Final = "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n"
CUT: Final = "What does a stack do?"
SHEETS: Final = ("cut", "reload", "error")
SHEET_SCALE: Final = 0.6
GAP: Final = 24
"""Pixels between the pictures of a sheet."""
PATIENCE_MS: Final = 60_000
COLOURS: Final = 256
"""A palette makes a picture a third as large."""


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """The address of the server that ``penstock`` with these words starts."""
    command = [str(Path(sys.executable).parent / "penstock"), *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                raise SystemExit("the server did not start")
            yield found.group()
        finally:
            process.terminate()


def opened(browser: Browser, url: str, size: tuple[int, int], theme: str) -> Page:
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#state")).to_have_text("idle", timeout=PATIENCE_MS)
    return page


def ask(page: Page) -> None:
    """Have a text continued, and wait until the tree has grown."""
    page.get_by_role("radio", name="Complete").check()
    page.locator("#settings summary").click()
    for name, value in {"max_tokens": 200, "seed": 4, "temperature": 0.7}.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.locator("#settings summary").click()
    page.locator("#prompt").fill(PROMPT)
    page.locator("#prompt").press("Enter")
    expect(page.locator("#tree .node.in-flight").nth(4)).to_be_attached(timeout=PATIENCE_MS)
    page.wait_for_timeout(4000)


def chat(page: Page) -> None:
    """Ask the chat model, and wait for some lines of its answer."""
    page.locator("#prompt").fill(QUESTION)
    page.locator("#prompt").press("Enter")
    expect(page.locator(".message .text").nth(1)).to_have_text(re.compile(r".{400}", re.S), timeout=PATIENCE_MS)


def finish(page: Page) -> None:
    page.locator("#stop").click()
    expect(page.locator("#send")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.locator("#state")).to_have_text("idle", timeout=PATIENCE_MS)


def be_cut(page: Page) -> None:
    """Have a chat's answer end at its limit of tokens."""
    page.locator("#settings summary").click()
    for name, value in {"max_tokens": 48, "seed": 4, "temperature": 0.7}.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.locator("#settings summary").click()
    page.locator("#prompt").fill(CUT)
    page.locator("#prompt").press("Enter")
    expect(page.locator(".end").last).to_contain_text("Cut at 48 tokens", timeout=PATIENCE_MS)
    expect(page.locator("#state")).to_have_text("idle", timeout=PATIENCE_MS)


def load_again(page: Page) -> None:
    page.reload()
    expect(page.locator("#state")).to_have_text("idle", timeout=PATIENCE_MS)
    expect(page.locator(".end").last).to_contain_text("Cut at 48 tokens")


def lose_the_server(page: Page) -> None:
    page.context.set_offline(True)
    page.locator("#prompt").fill(CUT)
    page.locator("#prompt").press("Enter")
    expect(page.locator(".notice")).to_be_visible(timeout=PATIENCE_MS)


def photograph(page: Page) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")


def keep(picture: Image.Image, name: str) -> None:
    file = IMAGES / f"page-{name}.png"
    small = picture.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small.save(file, optimize=True)
    print(f"{file} {file.stat().st_size // 1000} kB")


def sheet(pictures: list[Image.Image]) -> Image.Image:
    """The pictures beside each other, smaller."""
    small = [one.resize((int(SHEET_SCALE * one.width), int(SHEET_SCALE * one.height))) for one in pictures]
    size = (sum(one.width + GAP for one in small) - GAP, max(one.height for one in small))
    found, left = Image.new("RGB", size, "grey"), 0
    for one in small:
        found.paste(one, (left, 0))
        left += one.width + GAP
    return found


def main() -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with serving(*CHAT) as url:
            page = opened(browser, url, SIZES["wide"], "light")
            chat(page)
            keep(photograph(page), "chat")
        with serving(*COMMAND) as url:
            photograph_all(browser, url)
        browser.close()


def photograph_all(browser: Browser, url: str) -> None:
    """Every state of the page at every width in both themes."""
    sheets: dict[str, list[Image.Image]] = {name: [] for name in SHEETS}
    for width, size in SIZES.items():
        for theme in THEMES:
            page = opened(browser, url, size, theme)
            keep(photograph(page), f"{width}-{theme}-idle")
            ask(page)
            keep(photograph(page), f"{width}-{theme}-busy")
            finish(page)
            page.context.close()
            page = opened(browser, url, size, theme)
            for name, lead in zip(SHEETS, (be_cut, load_again, lose_the_server), strict=True):
                lead(page)
                sheets[name].append(photograph(page))
            page.context.close()
    for name, pictures in sheets.items():
        keep(sheet(pictures), name)


if __name__ == "__main__":
    main()

"""Photograph the web page for docs/images: ``python scripts/page_shots.py`` (a minute; needs Chromium).

Three widths, both themes, idle and busy, over a server of the demo pair on four emulated boards.
"""

from __future__ import annotations

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
COMMAND: Final = ("serve", "demo", "--cluster", "demo", "--draft-model", "demo", "--strategy", "pipedec", "--port", "0")
SIZES: Final = {"wide": (1440, 900), "tablet": (820, 1180), "phone": (390, 844)}
THEMES: Final = ("light", "dark")
PROMPT: Final = "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n"
PATIENCE_MS: Final = 60_000
COLOURS: Final = 256
"""A palette makes a picture a third as large."""


@contextmanager
def serving() -> Iterator[str]:
    """The server's address."""
    command = [str(Path(sys.executable).parent / "penstock"), *COMMAND]
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


def finish(page: Page) -> None:
    page.locator("#stop").click()
    expect(page.locator("#send")).to_be_visible(timeout=PATIENCE_MS)
    expect(page.locator("#state")).to_have_text("idle", timeout=PATIENCE_MS)


def photograph(page: Page, name: str) -> None:
    file = IMAGES / f"page-{name}.png"
    page.screenshot(path=file, full_page=True)
    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small.save(file, optimize=True)
    print(f"{file} {file.stat().st_size // 1000} kB")


def main() -> None:
    with serving() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, size in SIZES.items():
            for theme in THEMES:
                page = opened(browser, url, size, theme)
                photograph(page, f"{width}-{theme}-idle")
                ask(page)
                photograph(page, f"{width}-{theme}-busy")
                finish(page)
                page.context.close()
        browser.close()


if __name__ == "__main__":
    main()

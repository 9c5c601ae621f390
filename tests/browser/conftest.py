"""Chromium, and a server over the tiny model for it to look at."""

import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.server.live import Live, serve

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@dataclass
class Visit:
    """A tab on the pool page. `faults`: what the console called an error, or the page did not catch; `requests`: URLs
    that the tab asked for."""

    page: "Page"
    live: Live
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.faults.append(f"not caught: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda line: self.faults.append(line.text) if line.type in ("error", "warning") else 0)

    async def open(self) -> None:
        await self.page.goto(self.live.url)
        await self.wait_live()

    async def wait_live(self) -> None:
        await self.page.locator("#link[data-state=live]").wait_for()

    async def wait_text(self, id: str, pattern: str) -> str:
        """The text of an element, once it matches."""
        found = self.page.locator(f"#{id}").filter(has_text=re.compile(pattern))
        await found.wait_for(timeout=20_000)
        return (await found.text_content() or "").strip()

    async def ask(self, message: str, max_tokens: int) -> None:
        await self.page.get_by_label("Max tokens").fill(str(max_tokens))
        await self.page.get_by_label("Message").fill(message)
        await self.page.get_by_role("button", name="Send").click()

    async def has_focus(self, id: str) -> bool:
        return bool(await self.page.locator(f"#{id}").evaluate("(element) => element === document.activeElement"))

    async def wait_answer(self) -> None:
        """Until some of it has come."""
        await self.page.locator("#chat li:last-child p:not(:empty)").filter(has_text=re.compile(".")).wait_for()

    async def answer(self) -> str:
        return await self.page.locator("#chat li").last.locator("p").text_content() or ""

    async def colors(self, id: str) -> dict[str, int]:
        """Pixels of a canvas by colour, as `r g b`; without those that are not painted."""
        counted: dict[str, int] = await self.page.evaluate(
            """(id) => {
              const canvas = document.getElementById(id), counts = {}, { width, height } = canvas;
              const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
              copy.drawImage(canvas, 0, 0);
              const { data } = copy.getImageData(0, 0, width, height);
              for (let at = 0; at < data.length; at += 4) {
                if (data[at + 3] !== 255) continue;
                const color = `${data[at]} ${data[at + 1]} ${data[at + 2]}`;
                counts[color] = (counts[color] ?? 0) + 1;
              }
              return counts;
            }""",
            id,
        )
        return counted

    async def color(self, name: str) -> str:
        """A colour of the style sheet, as `r g b`."""
        value: str = await self.page.evaluate(
            "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()", f"--{name}"
        )
        return " ".join(str(int(value[at : at + 2], 16)) for at in (1, 3, 5))

    def check(self) -> None:
        """Nothing went wrong, and no other server was asked for anything."""
        assert self.faults == []
        origins = {urlsplit(url)[:2] for url in self.requests if not url.startswith("data:")}
        assert origins == {urlsplit(self.live.url)[:2]}


@pytest.fixture
async def chromium(tmp_path: Path) -> AsyncIterator["BrowserContext"]:
    """With a profile of its own."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        context = await playwright.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=CHROMIUM, headless=True, args=ARGUMENTS, reduced_motion="reduce"
        )
        yield context
        await context.close()


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with serve(shows_previews=True, is_endless=True, max_model_len=4096, kv_memory=3 * 2**20) as live:
        yield live


@pytest.fixture
async def visit(live: Live, chromium: "BrowserContext") -> Visit:
    return Visit(await chromium.new_page(), live)


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("QUIRE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder

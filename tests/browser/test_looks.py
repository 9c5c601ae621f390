"""The page in both colour schemes and several widths: screenshots to look at, accessibility by axe, nothing cut off."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import httpx
import pytest

from server.keys import KeyFile
from tests.browser.conftest import Visit
from tests.browser.test_page import KEY, complete
from tests.server.live import serve

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext

pytestmark = pytest.mark.browser
SIZES = {"desktop": (1280, 900), "phone": (390, 844), "narrow": (320, 640)}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SYSTEM = "You answer questions about the city's buses, in the language of whoever asks, and in few words. " * 2
QUESTIONS = (
    "When does line 4 start on Sundays? ",
    "Où est l'arrêt ? ",
    "Fahren nachts auch Busse? ",
    "¿Cuánto cuesta? ",
)


async def start_company(client: httpx.AsyncClient) -> list[asyncio.Task[None]]:
    """Texts that are cached, and requests that run on, some of them with the same beginning."""
    texts = (SYSTEM + QUESTIONS[number % 4] * (1 + number // 4) for number in range(24))
    await asyncio.gather(*(complete(client, text, 20 + 5 * number) for number, text in enumerate(texts)))
    prompts = [SYSTEM + QUESTIONS[number % 2] * 3 for number in range(4)] + ["Something else entirely. " * 20]
    return [asyncio.create_task(complete(client, prompt, 3000)) for prompt in prompts]


@pytest.mark.parametrize("name", SIZES)
async def test_looks(visit: Visit, screenshots: Path, name: str) -> None:
    page = visit.page
    width, height = SIZES[name]
    await page.set_viewport_size({"width": width, "height": height})
    async with visit.live.client() as client:
        running = await start_company(client)
        await visit.open()
        await page.locator("#requests button").first.click()
        await page.locator("#selected-legend").wait_for()
        await visit.ask("When does line 4 start?", 40)
        await visit.wait_text("chat-status", "tokens")
        await check_looks(visit, screenshots, name)
        await check_tables(visit, width)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    visit.check()


@pytest.mark.parametrize("name", SIZES)
async def test_looks_when_nothing_happens(visit: Visit, screenshots: Path, name: str) -> None:
    """An empty pool; then one answer, streaming; then a server that refuses."""
    width, height = SIZES[name]
    await visit.page.set_viewport_size({"width": width, "height": height})
    await visit.open()
    await check_looks(visit, screenshots, f"empty-{name}")
    await visit.ask("Hello?", 3000)
    await visit.page.locator("#requests tr").first.wait_for()
    await visit.wait_answer()
    await check_looks(visit, screenshots, f"running-{name}")
    await visit.page.keyboard.press("Escape")
    await visit.wait_text("chat-status", "Stopped")
    visit.live.service.drain()
    await visit.wait_text("old", "ago")
    await visit.ask("Still there?", 20)
    await visit.wait_text("chat-status", "No answer")
    await check_looks(visit, screenshots, f"lost-{name}")


@pytest.mark.parametrize("name", SIZES)
async def test_looks_when_a_key_is_asked_for(
    tmp_path: Path, chromium: "BrowserContext", screenshots: Path, name: str
) -> None:
    (tmp_path / "keys").write_text(f"alice {KEY}\n")
    async with serve(KeyFile(tmp_path / "keys")) as live:
        visit = Visit(await chromium.new_page(), live)
        width, height = SIZES[name]
        await visit.page.set_viewport_size({"width": width, "height": height})
        await visit.page.goto(live.url)
        await visit.page.get_by_label("Key", exact=True).fill("not the right key")
        await visit.page.keyboard.press("Enter")
        await visit.wait_text("key-error", "not known")
        await check_looks(visit, screenshots, f"key-{name}")


async def check_looks(visit: Visit, screenshots: Path, name: str) -> None:
    page = visit.page
    for scheme in SCHEMES:
        await page.emulate_media(color_scheme=scheme)
        await page.screenshot(path=screenshots / f"{name}-{scheme}.png", full_page=True)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await check_accessibility(visit)


async def check_tables(visit: Visit, width: int) -> None:
    """No cell is cut off at the side. What scrolls has a name and takes the focus."""
    for name, num_columns in (("running requests", 6), ("the prefix tree", 6)):
        region = visit.page.get_by_role("region", name=f"Table of {name}", exact=True)
        assert await region.get_attribute("tabindex") == "0"
        assert await region.evaluate("(region) => region.scrollWidth <= region.clientWidth")
        row = region.locator("tbody tr").first
        assert await row.locator("th, td").count() == num_columns
        for cell in await row.locator("th, td").all():
            await cell.scroll_into_view_if_needed()
            box = await cell.bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
            assert await cell.evaluate("(cell) => cell.scrollWidth <= cell.clientWidth || cell.clientWidth === 0")


async def check_accessibility(visit: Visit) -> None:
    from axe_playwright_python.async_playwright import Axe

    report = (await Axe().run(visit.page)).response
    violations = [(rule["id"], node["target"]) for rule in report["violations"] for node in rule["nodes"]]
    assert violations == []
    passes = {rule["id"] for rule in report["passes"]}
    assert {"color-contrast", "label", "landmark-one-main"} <= passes
    if await visit.page.get_by_role("treegrid").count():
        assert "aria-required-children" in passes

"""The page in both colour schemes and two widths: screenshots to look at, accessibility by axe, nothing cut off."""

import asyncio
from pathlib import Path
from typing import Literal

import httpx
import pytest

from tests.browser.conftest import Visit
from tests.browser.test_page import complete

pytestmark = pytest.mark.browser
SIZES = {"desktop": (1280, 900), "phone": (360, 740)}
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
        for scheme in SCHEMES:
            await page.emulate_media(color_scheme=scheme)
            await page.screenshot(path=screenshots / f"{name}-{scheme}.png", full_page=True)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            await check_accessibility(visit)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    visit.check()


async def check_accessibility(visit: Visit) -> None:
    from axe_playwright_python.async_playwright import Axe

    report = (await Axe().run(visit.page)).response
    violations = [(rule["id"], node["target"]) for rule in report["violations"] for node in rule["nodes"]]
    assert violations == []
    passes = {rule["id"] for rule in report["passes"]}
    assert {"color-contrast", "label", "landmark-one-main", "aria-required-children"} <= passes

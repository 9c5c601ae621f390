"""The pool page in Chromium: what it shows is what the server says, and what is typed reaches the engine."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from server.keys import KeyFile
from tests.browser.conftest import Visit
from tests.server.live import serve

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext

pytestmark = pytest.mark.browser
KEY = "0123456789abcdef"
PROMPT = "Many requests begin with these same words, which take some pages of the pool. " * 3


async def complete(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    (await client.post("/v1/completions", json=body)).raise_for_status()


async def test_it_shows_the_pool(visit: Visit) -> None:
    await visit.open()
    assert await visit.wait_text("model", "tiny") == "tiny"
    async with visit.live.client() as client:
        states = (await client.get("/v1/pool")).json()["tiers"]["sealed"]["states"]
    assert await visit.wait_text("sealed-free", r"\d") == f"{states['free']['pages']:,}"
    label = await visit.page.locator("#sealed").get_attribute("aria-label")
    assert label is not None and f"{states['free']['pages']:,} free" in label
    assert set(await visit.colors("sealed")) == {await visit.color("free")}
    visit.check()


async def test_cells_change(visit: Visit) -> None:
    """Pages that a request leaves behind are painted as cached; their pixels are as many as their cells."""
    await visit.open()
    free, cached = await visit.color("free"), await visit.color("cached")
    before = (await visit.colors("sealed"))[free]
    async with visit.live.client() as client:
        await complete(client, PROMPT, 4)
        states = (await client.get("/v1/pool")).json()["tiers"]["sealed"]["states"]
    num_cached = states["cached"]["pages"]
    assert num_cached > 2
    await visit.wait_text("sealed-cached", f"^{num_cached}$")
    after = await visit.colors("sealed")
    assert set(after) == {free, cached} and after[cached] + after[free] == before
    assert after[cached] * (states["free"]["pages"] + num_cached) == num_cached * before
    visit.check()


async def test_a_chat_streams(visit: Visit) -> None:
    await visit.open()
    await visit.ask("Hello? " * 10, 600)
    lengths = set()
    while await visit.page.get_by_role("button", name="Stop").is_enabled():
        lengths.add(len(await visit.answer()))
    assert len(lengths) > 3  # it grew while it was looked at
    assert " 600 tokens" in await visit.wait_text("chat-status", "^Cut off")
    assert len(await visit.answer()) >= max(lengths) > 0
    await visit.ask("And then?", 5)
    # The second prompt begins with the first one, of which whole pages are cached.
    status = await visit.wait_text("chat-status", " 5 tokens")
    assert int(status.split("; ")[1].split()[0]) >= 64
    assert await visit.page.locator("#chat li").count() == 4
    visit.check()


async def test_a_chat_does_not_wait_for_the_pool(visit: Visit) -> None:
    """Sent before the first event has come, and so before the page has asked for the model's name."""
    await visit.page.route("**/v1/pool/events*", lambda route: None)
    await visit.page.goto(visit.live.url)
    await visit.ask("Hello?", 3)
    assert await visit.wait_text("chat-status", "3 tokens")
    visit.check()


async def test_stop_ends_the_request(visit: Visit) -> None:
    await visit.open()
    await visit.ask("Tell me everything.", 3000)
    while len(await visit.answer()) <= 20:
        assert await visit.page.locator("#chat-status").text_content() == "Answering …"
    await visit.page.get_by_role("button", name="Stop").click()
    assert await visit.wait_text("chat-status", "Stopped") == "Stopped."
    await asyncio.wait_for(visit.live.service.wait_idle(), 10)
    snapshot = await visit.live.engine.inspect(check=True)
    assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)
    assert visit.live.counted("requests_aborted")["client"] == 1
    assert len(await visit.answer()) > 20  # what came is kept
    visit.check()


async def test_a_request_lights_up(visit: Visit) -> None:
    async with visit.live.client() as client:
        running = asyncio.create_task(complete(client, PROMPT, 3500))
        await visit.open()
        button = visit.page.locator("#requests button")
        await button.wait_for()
        assert await visit.color("selected") not in await visit.colors("sealed")
        await button.click()
        assert await button.get_attribute("aria-pressed") == "true"
        await visit.page.locator("#selected-legend").wait_for()
        assert await visit.wait_text("selected-count", r"^([8-9]|\d\d+)$")  # its prompt takes 8
        assert (await visit.colors("sealed"))[await visit.color("selected")] > 0
        await button.click()
        await visit.page.locator("#selected-legend").wait_for(state="hidden")
        assert await visit.color("selected") not in await visit.colors("sealed")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await visit.page.locator("#requests tr").wait_for(state="detached")
    assert await visit.wait_text("requests-note", "No request")
    visit.check()


async def test_the_tree_is_moved_through_by_keys(visit: Visit) -> None:
    async with visit.live.client() as client:
        for ending in ("one " * 40, "two " * 40, "three " * 40):
            await complete(client, PROMPT + ending, 4)
        await visit.open()
    rows = visit.page.get_by_role("treegrid").locator("tbody").get_by_role("row")
    await rows.nth(3).wait_for()
    assert await rows.count() == 4  # what they share, and three endings
    assert PROMPT[:32] in (await rows.first.inner_text())
    await rows.first.focus()
    for key, count in (("ArrowLeft", 1), ("ArrowRight", 4), ("Enter", 1), ("Enter", 4)):
        await visit.page.keyboard.press(key)
        assert await rows.count() == count
        assert await rows.first.get_attribute("aria-expanded") == ("true" if count > 1 else "false")
    for key, place in (("ArrowRight", 1), ("ArrowDown", 2), ("End", 3), ("ArrowLeft", 0), ("ArrowDown", 1)):
        await visit.page.keyboard.press(key)
        assert await rows.nth(place).evaluate("(row) => row === document.activeElement"), (key, place)
    seen = await visit.page.evaluate("new Promise((done) => setTimeout(done, 1500))")  # an update or two go by
    assert seen is None and await rows.nth(1).evaluate("(row) => row === document.activeElement")
    visit.check()


async def test_texts_of_several_keys_lie_apart(tmp_path: Path, chromium: "BrowserContext") -> None:
    (tmp_path / "keys").write_text(f"alice {KEY}\nbob {KEY}-of-bob\n")
    async with serve(KeyFile(tmp_path / "keys")) as live:
        for key in (KEY, f"{KEY}-of-bob"):
            async with live.client(authorization=f"Bearer {key}") as client:
                await complete(client, PROMPT, 4)
        visit = Visit(await chromium.new_page(), live)
        await visit.page.add_init_script(f"sessionStorage.setItem('quire-key', '{KEY}')")
        await visit.open()
        rows = visit.page.get_by_role("treegrid").locator("tbody").get_by_role("row")
        await rows.nth(3).wait_for()
        told = [((await row.inner_text()).split("\t")[0].lstrip("▾▸"), await row.get_attribute("aria-level"))
                for row in await rows.all()]  # fmt: skip
        assert told == [("Key 1", "1"), ("7 pages", "2"), ("Key 2", "1"), ("7 pages", "2")]
        visit.check()


async def test_text_of_users_stays_text(visit: Visit) -> None:
    evil = "<img src=x onerror=document.title=1><b>bold</b>" * 3
    async with visit.live.client() as client:
        await complete(client, evil, 4)
        await visit.open()
    preview = visit.page.locator("#tree .preview").first
    await preview.wait_for()
    assert await preview.text_content() == evil[:32]  # a page has 32 tokens of a byte
    await visit.ask(evil, 3)
    assert await visit.page.locator("#chat li").first.locator("p").text_content() == evil
    await visit.wait_text("chat-status", "tokens")
    assert (
        await visit.page.title() == "Quire" and await visit.page.locator("main img, main b:not(.legend b)").count() == 0
    )
    visit.check()


async def test_a_key_is_asked_for(tmp_path: Path, chromium: "BrowserContext") -> None:
    (tmp_path / "keys").write_text(f"alice {KEY}\n")
    async with serve(KeyFile(tmp_path / "keys")) as live:
        visit = Visit(await chromium.new_page(), live)
        page = visit.page
        await page.goto(live.url)
        field = page.get_by_label("Key", exact=True)
        await field.wait_for()
        assert await field.evaluate("(field) => field === document.activeElement")
        assert await page.get_by_role("alert").text_content() == ""
        for id in ("tiles", "pool", "playground"):  # nothing to show, nobody to ask
            assert not await page.locator(f"#{id}").is_visible()
        await field.fill("not the right key")
        await page.keyboard.press("Enter")
        assert await visit.wait_text("key-error", "not known") == "This key is not known here"
        await field.fill(f"\u201c{KEY}\u201d")  # pasted with quotes, which no header can carry
        assert await field.evaluate("(field) => field.validity.patternMismatch")
        await field.fill(KEY)
        await page.get_by_role("button", name="Use the key").click()
        await visit.wait_live()
        assert not await field.is_visible() and await visit.has_focus("title")
        await visit.ask("Hello?", 3)
        await visit.wait_text("chat-status", "tokens")
        await page.reload()
        await visit.wait_live()
        assert KEY not in await page.content() and all(KEY not in url for url in visit.requests)
        await page.get_by_role("button", name="Forget the key").click()
        await field.wait_for()
        assert all("401" in fault for fault in visit.faults)  # what Chromium itself says of such an answer
        visit.faults.clear()
        visit.check()


async def test_it_connects_again(visit: Visit) -> None:
    await visit.open()
    old = visit.page.locator("#old")
    assert not await old.is_visible() and await old.text_content() == ""
    visit.live.service.drain()
    words = r"^\s*The server is stopping or away; trying again (in \d+ s|now)\s*$"
    await visit.wait_text("link", words)  # the stream has ended
    async with visit.page.expect_response(lambda response: response.status == 503):
        pass
    await visit.wait_text("link", words)
    await visit.wait_text("old", r"^Not live: these numbers are as of \d+ s ago\.$")
    assert await visit.page.locator("#tiles").get_attribute("aria-describedby") == "old"
    visit.live.service.is_draining = False
    await visit.wait_live()
    assert await visit.page.locator("#link-more").text_content() == ""
    assert not await old.is_visible() and await old.text_content() == ""
    assert all("503" in fault for fault in visit.faults)
    visit.faults.clear()
    visit.check()

"""The pool page in the hands of a person: where the focus goes, what is said when an answer ends early, what an empty
table looks like, and what the memory consists of."""

import asyncio
import json
from typing import TYPE_CHECKING

import httpx
import pytest

from server.service import shutting_down
from tests.browser.conftest import Visit
from tests.browser.test_page import PROMPT, complete

if TYPE_CHECKING:
    from playwright.async_api import Route

pytestmark = pytest.mark.browser
MIB = 2**20


@pytest.mark.parametrize("ends_by", ["button", "escape"])
async def test_an_answer_is_stopped_by_keys(visit: Visit, ends_by: str) -> None:
    """The focus stays where it is, or goes to the message where the button that had it is of no more use."""
    page = visit.page
    await visit.open()
    await page.get_by_label("Max tokens").fill("3000")
    await page.get_by_label("Message").fill("Tell me everything.")
    await page.get_by_role("button", name="Send").focus()
    await page.keyboard.press("Enter")
    await page.locator("#stop:enabled").wait_for()
    assert await visit.has_focus("send")
    await page.keyboard.press("Enter")  # nothing is sent twice
    assert await page.locator("#chat li").count() == 2
    await visit.wait_answer()
    if ends_by == "button":
        await page.get_by_role("button", name="Stop").focus()
    await page.keyboard.press("Enter" if ends_by == "button" else "Escape")
    assert await visit.wait_text("chat-status", "Stopped") == "Stopped."
    assert await visit.has_focus("message" if ends_by == "button" else "send")
    await asyncio.wait_for(visit.live.service.wait_idle(), 10)
    visit.check()


async def test_an_answer_that_ended_early_stays_marked(visit: Visit) -> None:
    await visit.open()
    heads = visit.page.locator("#chat h3")
    await visit.ask("Hello?", 5)
    await visit.wait_text("chat-status", "^Cut off at the bound")
    await visit.ask("Tell me everything.", 3000)
    await visit.wait_answer()
    await visit.page.keyboard.press("Escape")
    await visit.wait_text("chat-status", "Stopped")
    assert await heads.all_text_contents() == ["You", "Model, cut off", "You", "Model, stopped"]
    await visit.ask("Tell me more.", 3000)
    await visit.wait_answer()
    visit.live.service.drain()
    visit.live.service.fail(shutting_down())
    assert "cut off: the server is shutting down" in await visit.wait_text("chat-status", "^The answer was")
    assert (await heads.all_text_contents())[:4] == ["You", "Model, cut off", "You", "Model, stopped"]
    assert await heads.last.text_content() == "Model, cut off"


async def test_no_server_is_said_in_words(visit: Visit) -> None:
    """Those of a person, not the browser's; and the question need not be typed again."""
    await visit.open()
    await visit.page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    await visit.ask("Still there?", 3)
    assert await visit.wait_text("chat-status", "No answer") == "No answer: the server cannot be reached."
    assert await visit.page.locator("#chat h3").all_text_contents() == ["You", "Model, no answer"]
    assert await visit.page.get_by_label("Message").input_value() == "Still there?"
    await visit.page.route("**/v1/pool/events*", lambda route: route.abort("connectionrefused"))
    await visit.page.reload()
    await visit.wait_text("link", "^\\s*The server cannot be reached; trying again")
    assert not await visit.page.locator("#pool").is_visible()
    assert await visit.page.locator("#playground").is_visible()


async def test_a_server_that_falls_silent(visit: Visit) -> None:
    """The connection stands and nothing comes: after ten seconds the numbers are called old, after a minute the page
    connects again."""
    page = visit.page

    async def slow(route: "Route") -> None:
        await route.continue_(url=route.request.url.replace("interval_ms=2000", "interval_ms=60000"))

    await page.route("**/v1/pool/events*", slow)
    await page.clock.install()
    await visit.open()
    await page.clock.run_for(11_500)
    assert await visit.wait_text("link", "Waiting") == "Waiting for the server"
    assert await visit.wait_text("old", r"as of 1\d s ago")
    await page.route("**/v1/pool/events*", lambda route: None)  # the next attempt gets no answer
    async with page.expect_request("**/v1/pool/events*"):
        await page.clock.run_for(50_000)
    await visit.wait_text("link", r"^\s*The server is silent; trying again now")
    visit.check()


async def test_what_is_empty_has_no_table(visit: Visit) -> None:
    page = visit.page
    await visit.open()
    assert await visit.wait_text("requests-note", "No request") == "No request is running."
    assert await visit.wait_text("tree-note", "No page") == "No page is known yet."
    assert await page.locator("table:visible").count() == 0
    async with visit.live.client() as client:
        running = asyncio.create_task(complete(client, PROMPT, 3500))
        button = page.locator("#requests button")
        await button.focus()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await page.locator("#requests-scroll").wait_for(state="hidden")
    assert await visit.has_focus("requests-title")  # the focus does not go with the request
    row = page.get_by_role("treegrid").locator("tbody").get_by_role("row").first
    await row.locator("td").nth(4).filter(has_text=" ago").wait_for()
    visit.check()


async def test_a_leaf_has_nothing_to_open(visit: Visit) -> None:
    """Neither for the eye nor for a screen reader."""
    async with visit.live.client() as client:
        await complete(client, PROMPT, 4)
        num_pages = (await client.get("/v1/pool")).json()["prefix_cache"]["nodes"]
        await visit.open()
    row = visit.page.get_by_role("treegrid").locator("tbody").get_by_role("row").first
    await row.wait_for()
    assert await row.get_by_role("button").count() == 0
    text = await row.locator("td").first.text_content()
    assert text is not None and not set("▾▸") & set(text) and text.endswith(f" {num_pages} pages")
    visit.check()


async def test_memory_says_what_is_not_quantized(visit: Visit) -> None:
    """Of a few short texts most memory is in first pages, which are in 32 bit here: more than all in 16 bit."""
    async with visit.live.client() as client:
        for prompt in (PROMPT, *(f"{number} is the number of this prompt, which is short." for number in range(4))):
            await complete(client, prompt, 4)
        tiers = (await client.get("/v1/pool")).json()["tiers"]
    used = {name: tiers[name]["total"]["bytes"] - tiers[name]["states"]["free"]["bytes"] for name in ("sealed", "open")}
    assert used["open"] > used["sealed"] > 0
    await visit.open()
    assert await visit.wait_text("memory", "[1-9]") == size(sum(used.values()))
    said = await visit.wait_text("memory-open-note", r"\d")
    assert said == f"{size(used['open'])} of it in first and newest pages: 32 bit, counted whole"
    open_width, sealed_width = [
        await visit.page.locator(f"#memory-{name}").evaluate("(bar) => bar.getBoundingClientRect().width")
        for name in ("open", "sealed")
    ]
    assert open_width / sealed_width == pytest.approx(used["open"] / used["sealed"], rel=0.05)
    visit.check()


def size(num_bytes: int) -> str:
    """As the page rounds it, without an end of `.0`."""
    value, unit = (num_bytes / MIB, "MiB") if num_bytes >= MIB else (num_bytes / 1024, "KiB")
    return f"{value:,.1f} {unit}".replace(".0 ", " ")


async def test_rates_begin_anew_with_another_server(visit: Visit) -> None:
    """The clock is the host's, so it goes on; counters begin at 0."""
    async with httpx.AsyncClient(base_url=visit.live.url) as client:
        pool = (await client.get("/v1/pool")).json()
        pool["map"] = {**(await client.get("/v1/pool/map")).json(), "selected": None}
    events, begin = "", pool["map"]["seconds"]
    for second, tokens in ((0, 5000), (5, 9000), (10, 20), (15, 320)):
        pool["map"]["seconds"], pool["map"]["counters"]["generated_tokens"] = begin + second, tokens
        events += f"data: {json.dumps(pool)}\n\n"
    await visit.page.route("**/v1/pool/events*", lambda route: route.fulfill(body=events))
    await visit.page.goto(visit.live.url)
    await visit.wait_text("speed", "^60$")
    visit.check()

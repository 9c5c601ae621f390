"""Chat templates in processes of their own: the same text as in this one, and no template can hold up the server."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.chat_template import ChatPrompt, ChatRenderer, ChatTemplate
from engine.errors import ErrorKind, RequestError, StartupError
from server import template_worker
from server.template_worker import TemplateBounds, TemplateWorkers
from tests.model_folders import CHAT_TEMPLATE
from tests.server.conftest import within

SPECIAL = ("<s>", "</s>")
# `action` says what to do; the rest is a chat.
ACTIONS = """{%- if action == 'forever' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif action == 'busy' %}{% set x = (10 ** 300000000) %}
{%- elif action == 'grow' %}{% set x = 'a' * 10**10 %}
{%- elif action == 'grow slowly' %}{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}
{%- endfor %}
{%- elif action == 'long' %}{% for i in range(9000) %}{{ 'a' * 1000 }}{% endfor %}
{%- elif action == 'reach out' %}{{ ''.__class__.__mro__ }}{% include '/etc/passwd' %}
{%- endif %}"""
TEMPLATE = ACTIONS + CHAT_TEMPLATE + "{{ tools | tojson if tools }}{{ name }}"
HELLO = ChatPrompt([{"role": "user", "content": "hello"}])


def template(source: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def acting(action: str) -> ChatPrompt:
    return ChatPrompt(HELLO.messages, variables={"action": action})


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., TemplateWorkers]]:
    made: list[TemplateWorkers] = []

    def start(source: str = TEMPLATE, **bounds: Any) -> TemplateWorkers:
        made.append(TemplateWorkers(template(source), SPECIAL, TemplateBounds(**bounds)))
        return made[-1]

    yield start
    for workers in made:
        await workers.close()
    assert children() == set()


def children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in map(int, (task / "children").read_text().split()) if is_child_running(pid)}


@pytest.mark.parametrize(
    "prompt",
    [
        HELLO,
        ChatPrompt(
            [{"role": "user", "content": "</s><s>"}, {"role": "tool", "content": None}], add_generation_prompt=False
        ),
        ChatPrompt(
            [{"role": "a", "content": "\ud800\x00\u2028é\U0001f642"}],
            [{"x": [1.5, None, {"</s>": True}]}],
            {"name": "<s>"},
        ),
        ChatPrompt([{"role": "user", "content": "word " * 400_000}]),
        ChatPrompt([{"role": "user", "content": "\x01" * 2**20}]),
    ],
)
async def test_the_result_is_that_of_this_process(start: Callable[..., TemplateWorkers], prompt: ChatPrompt) -> None:
    assert await start().render(prompt) == ChatRenderer(template(), SPECIAL).render(prompt)


@pytest.mark.parametrize("prompt", [ChatPrompt([{"role": "user"}]), acting("long"), acting("reach out")])
async def test_refusals_are_those_of_this_process(start: Callable[..., TemplateWorkers], prompt: ChatPrompt) -> None:
    workers = start("{{ raise_exception('no content') if not messages[0].content }}" + TEMPLATE)
    with pytest.raises(RequestError) as here:
        ChatRenderer(
            template("{{ raise_exception('no content') if not messages[0].content }}" + TEMPLATE), SPECIAL
        ).render(prompt)
    with pytest.raises(RequestError) as caught:
        await workers.render(prompt)
    assert caught.value.__dict__ == here.value.__dict__
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")
    assert await workers.render(HELLO)


@pytest.mark.parametrize("depth", [800, 5000])
async def test_messages_that_are_nested_too_deeply(start: Callable[..., TemplateWorkers], depth: int) -> None:
    """For this process to send, or only for the other to look into."""
    deep: Any = "x"
    for _ in range(depth):
        deep = [deep]
    workers = start()
    with pytest.raises(RequestError, match="messages are nested too deeply") as caught:
        await workers.render(ChatPrompt([{"role": "user", "content": deep}]))
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")
    assert await workers.render(HELLO)


@pytest.mark.parametrize("action", ["forever", "busy"])
async def test_a_render_is_bounded_in_time(start: Callable[..., TemplateWorkers], action: str) -> None:
    """Also where Python does not look for signals or other threads meanwhile."""
    workers = start(render_seconds=0.5)
    await workers.start()
    first = children()
    begin = time.monotonic()
    render = asyncio.create_task(workers.render(acting(action)))
    gaps = [time.monotonic()]
    while not render.done():
        await asyncio.sleep(0.005)
        gaps.append(time.monotonic())
    with pytest.raises(RequestError, match="takes more than 0.5 s for the messages") as caught:
        await render
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")
    assert 0.5 <= time.monotonic() - begin < 5
    assert max(after - before for before, after in zip(gaps, gaps[1:], strict=False)) < 0.4, "the loop goes on"
    assert await workers.render(HELLO)
    assert children().isdisjoint(first)


@pytest.mark.parametrize("action", ["grow", "grow slowly"])
async def test_a_render_is_bounded_in_memory(start: Callable[..., TemplateWorkers], action: str) -> None:
    workers = start(max_memory=2**28)
    with pytest.raises(RequestError, match="needs more memory for the messages than it may") as caught:
        await workers.render(acting(action))
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")
    assert await workers.render(HELLO)


async def test_a_process_that_dies_is_replaced(start: Callable[..., TemplateWorkers]) -> None:
    workers = start()
    await workers.start()
    render = asyncio.create_task(workers.render(acting("forever")))
    (pid,) = await busy_children(1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RequestError, match="ended the process that renders") as caught:
        await within(render)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")
    assert await workers.render(HELLO)


async def test_one_that_died_idle_fails_nobody(start: Callable[..., TemplateWorkers]) -> None:
    workers = start()
    await workers.start()
    (pid,) = children()
    os.kill(pid, signal.SIGKILL)
    while workers._idle[0].is_alive:  # until the loop has heard of it
        await asyncio.sleep(0.001)
    assert await workers.render(HELLO)


async def test_two_processes_and_a_bounded_wait(start: Callable[..., TemplateWorkers]) -> None:
    workers = start(render_seconds=30, wait_seconds=1)
    await asyncio.gather(*(workers.render(HELLO) for _ in range(20)))
    assert 1 <= len(children()) <= 2
    renders = [asyncio.create_task(workers.render(acting("forever"))) for _ in range(2)]
    await busy_children(2)
    with pytest.raises(RequestError, match="could be rendered for 1 s; try again later") as caught:
        await within(workers.render(HELLO))
    assert (caught.value.kind, caught.value.retry_after) == (ErrorKind.OVERLOADED, 1)
    assert len(children()) == 2
    await workers.close()
    assert [type(end) for end in await asyncio.gather(*renders, return_exceptions=True)] == [asyncio.CancelledError] * 2
    assert children() == set()
    with pytest.raises(RequestError, match="shutting down") as caught:
        await workers.render(HELLO)
    assert caught.value.kind is ErrorKind.UNAVAILABLE


async def test_clients_that_go_cost_no_process(start: Callable[..., TemplateWorkers]) -> None:
    workers = start(max_processes=1)
    await workers.start()
    first = children()
    for _ in range(30):
        render = asyncio.create_task(workers.render(HELLO))
        for _ in range(4):  # until the process has been asked
            await asyncio.sleep(0)
        render.cancel()
    assert await within(workers.render(HELLO)) == ChatRenderer(template(), SPECIAL).render(HELLO)
    assert children() == first


async def test_an_interrupt_from_the_terminal_is_for_the_server(start: Callable[..., TemplateWorkers]) -> None:
    await start().start()
    assert [os.getpgid(pid) for pid in children()] == list(children())


async def test_nothing_starts_before_it_is_needed(start: Callable[..., TemplateWorkers]) -> None:
    start()
    assert children() == set()


async def test_a_child_that_does_not_start_is_told(
    start: Callable[..., TemplateWorkers], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(template_worker, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server").mkdir()
    (tmp_path / "server/template_child.py").write_text("raise SystemExit(3)")
    workers = start()
    with pytest.raises(StartupError, match="the process for chat templates does not start"):
        await within(workers.start())
    with pytest.raises(RequestError) as caught:
        await within(workers.render(HELLO))
    assert caught.value.kind is ErrorKind.INTERNAL


SERVER = """
import asyncio, pathlib, sys
from engine.chat_template import ChatPrompt, ChatTemplate
from server.template_worker import TemplateBounds, TemplateWorkers
async def main():
    source, action = sys.argv[1:]
    workers = TemplateWorkers(ChatTemplate(source, {}), (), TemplateBounds(render_seconds=1))
    await workers.start()
    render = asyncio.create_task(workers.render(ChatPrompt([], variables={"action": action})))
    print(*(path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/children")), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("action", ["none", "forever"])
def test_no_child_outlives_a_server_that_was_killed(action: str) -> None:
    """At once where it waits, and otherwise a second after the bound of what it does."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SERVER, ACTIONS, action]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root)
    assert server.stdout
    (pid,) = map(int, server.stdout.readline().split())
    assert is_child_running(pid)
    idle, deadline = ticks(pid), time.monotonic() + 10
    while action == "forever" and ticks(pid) - idle < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.kill()
    server.wait()
    server.stdout.close()
    deadline = time.monotonic() + 10
    while is_child_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_child_loads_little() -> None:
    """Jinja and what is always there: no torch, no tokenizers, nothing else of the server."""
    code = "import sys, server.template_child; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    own = {name for name in loaded if name.split(".")[0] in ("engine", "server", "kernels", "proto")}
    assert own == {
        "engine", "engine.chat_template", "engine.errors", "engine.special_text", "server", "server.template_child"
    }  # fmt: skip
    assert "jinja2" in loaded
    assert loaded.isdisjoint({"torch", "tokenizers", "numpy", "pydantic", "starlette", "uvicorn", "grpc", "asyncio"})


def is_child_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        return (
            status.rpartition(")")[2].split()[0] != "Z"
            and b"template_child" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False


async def busy_children(count: int) -> set[int]:
    """The children, when so many of them have worked for longer since now than any chat takes."""
    before = {pid: ticks(pid) for pid in children()}
    deadline = time.monotonic() + 20
    while True:
        busy = {pid for pid in children() if ticks(pid) - before.setdefault(pid, 0) >= 5}
        if len(busy) == count:
            return busy
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def ticks(pid: int) -> int:
    """Hundredths of a second of processor time."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

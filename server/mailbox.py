"""Events of one call between the engine and whoever writes them out."""

import asyncio
from collections.abc import Sequence

from engine.request import Delta, Event


class Mailbox:
    """A queue whose deltas merge while nobody takes them: a slow reader gets fewer and longer ones, and what waits for
    it is never more than the text itself. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Event]] = {}
        self._filled = asyncio.Event()

    def put(self, index: int, event: Event) -> None:
        self._waiting.setdefault(index, []).append(event)
        self._filled.set()

    async def take(self) -> list[tuple[int, Event]]:
        """Wait for events and return all that are there: those of one index in order, and as few as they can be."""
        await self._filled.wait()
        waiting, self._waiting = self._waiting, {}
        self._filled.clear()
        return [(index, event) for index, events in waiting.items() for event in merge(events)]


def merge(events: Sequence[Event]) -> list[Event]:
    """The same events with neighbouring deltas joined."""
    if len(events) == 1:
        return list(events)
    merged: list[Event] = []
    deltas: list[Delta] = []
    for event in events:
        if isinstance(event, Delta):
            deltas.append(event)
        else:
            merged += [*_joined(deltas), event]
            deltas = []
    return merged + _joined(deltas)


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    if not deltas:
        return []
    return [
        Delta(
            "".join(delta.text for delta in deltas),
            tuple(id for delta in deltas for id in delta.token_ids),
            tuple(logprob for delta in deltas for logprob in delta.logprobs),
        )
    ]

"""Events between the engine and a writer that may be slow."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ErrorKind, RequestError
from engine.request import Delta, Event, Failed, Finished, FinishReason, Usage
from server.mailbox import Mailbox, merge

END = Finished(FinishReason.STOP, Usage(1, 0, 3))
DELTAS = st.builds(Delta, st.text(max_size=3), st.lists(st.integers(0, 9), max_size=2).map(tuple))


@given(st.lists(DELTAS, max_size=20), st.booleans())
def test_merging_keeps_the_text_and_the_ids(deltas: list[Delta], has_ended: bool) -> None:
    events: list[Event] = [*deltas, END] if has_ended else [*deltas]
    merged = merge(events)
    texts = [event for event in merged if isinstance(event, Delta)]
    assert len(texts) == min(1, len(deltas))
    assert "".join(delta.text for delta in texts) == "".join(delta.text for delta in deltas)
    assert [id for delta in texts for id in delta.token_ids] == [id for delta in deltas for id in delta.token_ids]
    assert merged[len(texts) :] == [END] * has_ended


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40))
def test_a_reader_that_comes_and_goes_misses_nothing(turns: list[tuple[int, bool]]) -> None:
    """Each turn puts a delta for one index, and then the reader may take what is there."""

    async def play() -> None:
        mailbox = Mailbox()
        got: dict[int, str] = {}
        for number, (index, is_taken) in enumerate([*turns, (0, True)]):
            mailbox.put(index, Delta(f"{number} ", (number,)))
            if is_taken:
                events = await mailbox.take()
                assert len({place for place, _ in events}) == len(events)  # one delta an index, however long it waited
                for place, event in events:
                    assert isinstance(event, Delta)
                    got[place] = got.get(place, "") + event.text
        for index in range(3):
            own = [f"{number} " for number, (place, _) in enumerate([*turns, (0, True)]) if place == index]
            assert got.get(index, "") == "".join(own)

    asyncio.run(play())


def test_a_failure_comes_after_what_was_there() -> None:
    error = Failed(RequestError(ErrorKind.INTERNAL, "no"))
    assert merge([Delta("a", (1,)), Delta("b", (2,)), error]) == [Delta("ab", (1, 2)), error]

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from engine.detokenizer import TextStream
from engine.token_bytes import byte_level_alphabet
from engine.tokenizer import Tokenizer

SPECIAL = "<|end|>"
TEXT = st.text(st.sampled_from("ab c\n.é今\U0001f336\ufffd"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab c.é今\ufffd"), min_size=1, max_size=5), max_size=4).map(tuple)
# Broken UTF-8: parts of characters, bytes that begin nothing, surrogates, overlong forms.
BROKEN = st.lists(
    st.sampled_from(
        [b"a", b"b", b"\xe4", b"\xbb", b"\x8a", b"\xf0\x9f", b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xc3"]
    ),
    max_size=20,
).map(b"".join)


class Tokens:
    """A byte-level tokenizer with exactly the given tokens, and one special token after them."""

    def __init__(self, *groups: list[bytes]):
        pieces = dict.fromkeys(piece for group in groups for piece in group)
        alphabet = byte_level_alphabet()
        vocab = {"".join(alphabet[byte] for byte in piece): id for id, piece in enumerate(pieces)}
        self.backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
        self.backend.decoder = decoders.ByteLevel()
        self.backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
        self.special = self.backend.token_to_id(SPECIAL)
        self.tokenizer = Tokenizer(self.backend, None)
        self._ids = {piece: id for id, piece in enumerate(pieces)}

    def ids(self, pieces: list[bytes]) -> list[int]:
        return [self._ids[piece] for piece in pieces]


def run(pieces: list[bytes], stop: tuple[str, ...] = (), prompt: list[bytes] | None = None):
    """The text that each token releases, what `finish` adds, and the stop string."""
    tokens = Tokens(pieces, prompt or [])
    stream = TextStream(tokens.tokenizer, stop, tokens.ids(prompt or []))
    released = [stream.feed(id) for id in tokens.ids(pieces)]
    return released, stream.finish(), stream.matched


def text_of(pieces: list[bytes], stop: tuple[str, ...] = (), prompt: list[bytes] | None = None) -> str:
    released, rest, _ = run(pieces, stop, prompt)
    return "".join(released) + rest


@st.composite
def cut(draw, data: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes cut into tokens at random places, also inside characters."""
    whole = draw(data)
    places = draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=len(whole)))
    edges = [0, *sorted(places), len(whole)]
    return [whole[a:b] for a, b in zip(edges, edges[1:], strict=False) if a < b]


PIECES = cut(TEXT.map(str.encode) | BROKEN)


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule, searched for in the whole text: the stop string that ends first; of those, the longest."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not found:
        return text, None
    end, _, matched = min(found)
    return text[: end - len(matched)], matched


@given(PIECES, STOPS)
def test_pieces_join_to_the_whole_text_up_to_the_first_stop(pieces, stop):
    tokens = Tokens(pieces)
    expected, matched = first_stop(tokens.backend.decode(tokens.ids(pieces)), stop)
    released, rest, found = run(pieces, stop)
    assert ("".join(released) + rest, found) == (expected, matched)


@given(PIECES, STOPS)
def test_only_the_beginning_of_a_stop_or_of_a_character_is_held_back(pieces, stop):
    tokens = Tokens(pieces)
    stream = TextStream(tokens.tokenizer, stop, [])
    beginnings = {s[:length] for s in stop for length in range(len(s))} | {""}
    sent = ""
    ids = tokens.ids(pieces)
    for count, id in enumerate(ids, 1):
        sent += stream.feed(id)
        if stream.matched is not None:
            break
        so_far = tokens.backend.decode(ids[:count])
        assert so_far.startswith(sent)
        held = so_far[len(sent) :]
        # One for an incomplete character. Python also waits one byte longer for ED A0, half a surrogate.
        assert any(held.removesuffix("\ufffd" * count) in beginnings for count in range(3))


@given(cut(TEXT.map(str.encode)), st.integers(0, 30), STOPS)
@example([b"a", b" b"], 1, ())
def test_text_continues_the_prompt(pieces, split, stop):
    prompt, generated = pieces[:split], pieces[split:]
    begun = b"".join(prompt).decode(errors="ignore")
    whole = b"".join(pieces).decode()
    # `ignore` drops the bytes of a character that only the generated tokens complete.
    expected, _ = first_stop(whole[len(begun) :], stop)
    assert text_of(generated, stop, prompt) == expected


def test_a_character_over_four_tokens_comes_out_whole():
    released, rest, _ = run([b"\xf0", b"\x9f", b"\x8c", b"\xb6", b"!"])
    assert (released, rest) == (["", "", "", "\U0001f336", "!"], "")


def test_an_incomplete_character_at_the_end_becomes_one_replacement():
    assert run([b"a\xf0\x9f"]) == (["a"], "\ufffd", None)


def test_a_real_replacement_character_is_text():
    assert run(["\ufffd".encode()]) == (["\ufffd"], "", None)


def test_stop_over_several_tokens_releases_none_of_it():
    released, rest, matched = run([b" D", b"EF", b"G", b"HI", b"J", b"K"], ("DEFGHIJ",))
    assert (released, rest, matched) == ([" ", "", "", "", "", ""], "", "DEFGHIJ")


def test_stop_inside_a_token_counts():
    assert run([b"It is", b" Paris", b"."], ("Pari",)) == (["It is", " ", ""], "", "Pari")


def test_stop_text_is_never_part_of_the_output():
    assert text_of([b"5", b", ", b"6", b", ", b"7", b", 8"], ("7",)) == "5, 6, "


def test_text_that_begins_no_stop_is_not_delayed():
    long_stop = "x" * 200
    released, _, _ = run([b"The", b" first", b" words"], (long_stop,))
    assert released == ["The", " first", " words"]


def test_a_beginning_that_goes_on_otherwise_is_released_up_to_the_next_beginning():
    released, rest, _ = run([b"a", b"a", b"b", b"a", b"c"], ("aabaab",))
    assert (released, rest) == (["", "", "", "", "aabac"], "")
    # What is held is a beginning again: `aaba` gives way to the `a` at its end.
    assert run([b"aaba", b"a", b"a"], ("aabab",))[0] == ["", "aab", "a"]


def test_multibyte_text_with_a_stop_that_never_comes():
    pieces = [bytes([byte]) for byte in "\u4eca\u5929\u5929\u6c14\u5f88\u597d".encode()]
    released, rest, matched = run(pieces, ("ZZZ",))
    assert "".join(released) + rest == "\u4eca\u5929\u5929\u6c14\u5f88\u597d"
    assert matched is None


def test_a_character_begun_by_the_prompt_leaks_nothing_of_it():
    prompt = [b"Hello world ", b"\xf0\x9f\x8c"]
    assert run([b"\xb6", b"!"], prompt=prompt)[0] == ["\U0001f336", "!"]
    assert run([b"\xb6"], prompt=[b"a", b"\xf0", b"\x9f", b"\x8c"])[0] == ["\U0001f336"]
    # Not completed: its replacement character is the prompt's, not the answer's.
    assert run([b"!"], prompt=prompt)[0] == ["!"]
    assert run([], prompt=prompt) == ([], "", None)
    # But one that the model completes to U+FFFD itself is text.
    assert run([b"\xbd"], prompt=[b"\xef\xbf"])[0] == ["\ufffd"]


def test_a_token_that_can_never_complete_is_not_held():
    count = 100_000
    for byte in (b"\xe4", b"\xbb", b"\xff"):
        tokens = Tokens([byte])
        stream = TextStream(tokens.tokenizer, ("stop",), [])
        sent = 0
        for fed in range(count):
            sent += len(stream.feed(0))
            assert sent >= fed
        assert sent + len(stream.finish()) == count


def test_first_complete_stop_wins_and_then_the_longest():
    whole = [b"xabcdy"]
    by_byte = [b"x", b"a", b"b", b"c", b"d", b"y"]
    for stop, expected in ((("abcd", "bc"), ("xa", "bc")), (("bc", "abc"), ("x", "abc")), (("c", "b"), ("xa", "b"))):
        for pieces in (whole, by_byte):
            released, rest, matched = run(pieces, stop)
            assert ("".join(released) + rest, matched) == expected


def test_special_tokens_have_no_text_and_do_not_part_a_character():
    tokens = Tokens([b"\xc3", b"\xa9"])
    stream = TextStream(tokens.tokenizer, ("end",), [])
    assert [stream.feed(id) for id in (0, tokens.special, 1)] == ["", "", "é"]


def test_nothing_comes_after_a_stop():
    tokens = Tokens([b"stop", b"more"])
    stream = TextStream(tokens.tokenizer, ("stop",), [])
    assert [stream.feed(id) for id in (0, 1, 1)] == ["", "", ""]
    assert stream.finish() == ""


def test_leading_space_is_text_only_after_other_text():
    pieces = ["<unk>", "<s>", "▁Paris", "▁is"]
    backend = tokenizers.Tokenizer(models.WordLevel({piece: id for id, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = Tokenizer(backend, None)
    for prompt, expected in (([1, 3], " Paris is"), ([3, 1], " Paris is"), ([1], "Paris is"), ([], "Paris is")):
        stream = TextStream(tokenizer, (), prompt)
        text = stream.feed(2) + stream.feed(3) + stream.finish()
        assert text == expected
        assert backend.decode([*prompt, 2, 3]) == backend.decode(prompt) + expected

"""The bound on how few tokens a text can have, against the tokens that it has."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from engine.model.checkpoint import open_checkpoint
from engine.model.demo_checkpoint import DEMO_NAME
from engine.tokenizer import Tokenizer
from tests.engine.vocabularies import VOCABULARIES


@cache
def vocabulary(name: str) -> Tokenizer:
    return open_checkpoint(DEMO_NAME).tokenizer() if name == "demo" else Tokenizer(VOCABULARIES[name](), None)


@pytest.mark.parametrize("name", [*VOCABULARIES, "demo"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_text_has_fewer_tokens_than_the_bound(name, data):
    tokenizer = vocabulary(name)
    unit = data.draw(st.one_of(st.sampled_from(["\x04", "\U00050000", " ", "the user", "</s>"]), st.text(max_size=6)))
    text = unit * data.draw(st.integers(1, 200)) + data.draw(st.text(max_size=6))
    assert len(tokenizer.encode(text, add_special_tokens=False)) >= tokenizer.fewest_tokens(text)


@pytest.mark.parametrize("name", ["byte level", "prepended", "metaspace always", "demo"])
def test_the_bound_is_the_longest_token(name):
    """So many of the longest token are that many tokens; and one byte more cannot be."""
    tokenizer = vocabulary(name)
    longest = max((tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)), key=len)
    assert tokenizer.fewest_tokens("x" * len(longest) * 50) == 50
    assert tokenizer.fewest_tokens("x" * len(longest) * 50 + "x") == 51
    assert tokenizer.fewest_tokens("é" * len(longest)) == 2


def test_where_text_may_vanish_there_is_no_bound():
    words = Backend(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.decoder = decoders.Fuse()
    for name in ("blanks, words, nested", "composing"):
        assert vocabulary(name).fewest_tokens("a" * 10**6) == 0
    assert Tokenizer(words, None).fewest_tokens("a" * 10**6) == 0

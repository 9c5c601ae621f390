import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.chat_template import ChatPrompt, ChatTemplate
from engine.errors import ErrorKind, RequestError, StartupError
from engine.model.checkpoint import open_checkpoint
from engine.model.demo_checkpoint import DEMO_NAME, demo_file
from engine.model.folder import read_tokenizer
from engine.token_bytes import byte_level_alphabet
from engine.tokenizer import Tokenizer
from tests.model_folders import byte_tokenizer, write_json, write_model_folder

RECORDED = json.loads((Path(__file__).parents[1] / "data/tokens/demo_model.json").read_text())
SAMPLES = {sample["name"]: sample for sample in RECORDED["samples"]}
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = ChatPrompt(MESSAGES)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return open_checkpoint(DEMO_NAME).tokenizer()


@pytest.mark.parametrize("name", SAMPLES)
def test_demo_ids_are_those_of_llama_cpp(demo, name):
    sample = SAMPLES[name]
    assert demo.encode(sample["text"]) == sample["ids"]
    assert demo.decode(sample["ids"], skip_special_tokens=False) == sample["text"]


@pytest.mark.peers
def test_recorded_ids_are_still_those_of_llama_cpp():
    binary = os.environ.get("QUIRE_LLAMA_SERVER")
    if not binary:
        pytest.skip("set QUIRE_LLAMA_SERVER to a llama-server binary")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "-c", "512", "-np", "1", "--no-warmup"]
    server = subprocess.Popen([binary, "-m", str(demo_file()), *options], stderr=subprocess.DEVNULL)
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", server)
        for name, sample in SAMPLES.items():
            body = {"content": sample["text"], **RECORDED["request"]}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/tokenize", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["tokens"] == sample["ids"], name
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_until_healthy(url: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None, "llama-server ended before it was ready"
            assert time.monotonic() < deadline, "llama-server was not ready within 60 s"
            time.sleep(0.2)


def test_special_tokens_are_skipped_on_request(demo):
    ids = demo.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert demo.decode(ids) == "user\nhi"
    assert demo.special_ids == set(range(17))


def test_demo_chat_prompt(demo):
    assert demo.render_chat(CHAT).text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    own_system = [{"role": "system", "content": "Be brief."}, *MESSAGES, {"role": "assistant", "content": "yo"}]
    assert demo.render_chat(ChatPrompt(own_system, add_generation_prompt=False)).text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    )
    ids = demo.encode_chat(CHAT)
    assert ids == demo.encode(demo.render_chat(CHAT).text)
    assert ids.count(1) == 3


def test_encode_chat_adds_no_second_bos(tmp_path):
    backend = byte_tokenizer()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = Tokenizer(backend, ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"}))
    assert tokenizer.encode("hi")[0] == 256
    assert tokenizer.encode("hi", add_special_tokens=False) == tokenizer.encode("hi")[1:]
    assert tokenizer.encode_chat(CHAT) == tokenizer.encode("hi")


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ude00\ud83d"])
def test_lone_surrogates_are_the_clients_error(demo, text):
    with pytest.raises(RequestError, match="lone surrogate at character") as caught:
        demo.encode(text, param="input")
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "input")
    with pytest.raises(RequestError) as caught:
        demo.encode_chat(ChatPrompt([{"role": "user", "content": text}]))
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="lone surrogate at character"):
        demo.encode_chat(ChatPrompt([{"role": "user", "content": "<|im_end|>" + text}]))


def test_special_tokens_of_the_demo_model_as_content(demo):
    """Also beside the words that its tokens merge with."""
    for token in demo.special_tokens:
        for content in (token, f"the{token} end"):
            ids = demo.encode_chat(ChatPrompt([{"role": "user", "content": content}]))
            assert [id for id in ids if id in demo.special_ids] == [1, 2] * 2 + [1]
            assert content in demo.decode(ids)


@pytest.mark.parametrize("unit", ["a", " ", "\n", "\u4eca", "\U0001f642", "word ", "7", "<|im_start|>"])
def test_a_megabyte_of_text_comes_back_whole(demo, unit):
    text = unit * (2**20 // len(unit.encode()))
    assert demo.decode(demo.encode(text), skip_special_tokens=False) == text


@given(st.text(max_size=80))
def test_any_text_comes_back_whole(text):
    tokenizer = Tokenizer(byte_tokenizer(), None)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_each_demo_token_decodes_as_the_library_does(demo):
    backend = demo._backend
    for id in range(demo.vocab_size):
        assert demo.decode([id], skip_special_tokens=False) == backend.decode([id], skip_special_tokens=False)


def test_ids_without_a_token_have_no_text(demo):
    assert demo.decode([4093, 49152, 10**6]) == demo.decode([4093])


def test_byte_alphabet_is_the_librarys():
    assert sorted(byte_level_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for char in ("a", " ", "é", "今", "\U0001f336"):
        assert split.pre_tokenize_str(char)[0][0] == "".join(byte_level_alphabet()[byte] for byte in char.encode())


SENTENCEPIECE = {
    "llama 2": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "no strip": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "metaspace, nothing prepended": decoders.Metaspace(prepend_scheme="never"),
}
PIECES = ["<unk>", "<s>", "▁Hello", "▁", "lo", "▁▁", "<0xE4>", "<0xBD>", "<0xA0>", "<0x20>", "é", "▁a▁b"]


def sentencepiece(decoder: tokenizers.decoders.Decoder) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({piece: id for id, piece in enumerate(PIECES)}, unk_token="<unk>"))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


TEXTS = [
    ["▁Hello", "lo", "▁Hello"],
    ["<s>", "▁Hello"],
    ["▁", "▁Hello"],
    ["lo", "▁"],
    ["▁Hello", "<0xE4>", "<0xBD>", "<0xA0>", "lo"],
    ["<0x20>", "lo"],
    [],
]
# The library's Metaspace drops every space of the first token, not only the one that was added.
SPACED = [["▁▁", "lo"], ["▁a▁b", "é"]]
DECODED = [(name, text) for name in SENTENCEPIECE for text in TEXTS + (SPACED if name != "metaspace" else [])]


@pytest.mark.parametrize(("name", "pieces"), DECODED)
def test_sentencepiece_decodes_as_the_library_does(name, pieces):
    backend = sentencepiece(SENTENCEPIECE[name])
    ids = [PIECES.index(piece) for piece in pieces]
    assert Tokenizer(backend, None).decode(ids) == backend.decode(ids)


def test_metaspace_drops_only_the_added_space():
    tokenizer = Tokenizer(sentencepiece(SENTENCEPIECE["metaspace"]), None)
    assert tokenizer.decode([PIECES.index("▁a▁b")]) == "a b"


def test_broken_bytes_do_not_take_whole_characters_with_them():
    tokenizer = Tokenizer(sentencepiece(SENTENCEPIECE["llama 2"]), None)
    ids = [PIECES.index(piece) for piece in ("<0xE4>", "<0xBD>", "<0xA0>", "<0xE4>", "lo")]
    assert tokenizer.decode(ids) == "\u4f60\ufffdlo"


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Replace("x", " "), decoders.Fuse()])]
)
def test_other_decoders_are_refused(decoder):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(StartupError, match="decoder step .* is not supported; supported: ByteLevel"):
        Tokenizer(backend, None)


def test_padding_and_truncation_in_the_file_are_off(tmp_path):
    write_model_folder(tmp_path)
    backend = byte_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(read_tokenizer(tmp_path).encode("hello")) == 5


def test_chat_template_is_found_in_three_places_and_the_newest_wins(tmp_path):
    write_model_folder(tmp_path)
    assert read_tokenizer(tmp_path).render_chat(CHAT).text == "<s>[user]hi</s>[assistant]"

    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list {{ eos_token }}"}]
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": named})
    assert read_tokenizer(tmp_path).render_chat(CHAT).text == "list </s>"

    write_json(tmp_path / "chat_template.json", {"chat_template": "json"})
    assert read_tokenizer(tmp_path).render_chat(CHAT).text == "json"

    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert read_tokenizer(tmp_path).render_chat(CHAT).text == "jinja"


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}])
def test_without_a_template_chat_is_refused_and_completions_work(tmp_path, config):
    write_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    if config is not None:
        write_json(tmp_path / "tokenizer_config.json", config)
    tokenizer = read_tokenizer(tmp_path)
    assert not tokenizer.has_chat_template
    assert tokenizer.encode("hi")
    with pytest.raises(RequestError, match="no chat template; use /v1/completions") as caught:
        tokenizer.encode_chat(CHAT)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", None, "tokenizer.json: file is missing"),
        ("tokenizer.json", "{}", "tokenizer.json: not a readable tokenizer"),
        ("tokenizer.json", "nope", "tokenizer.json: not a readable tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not readable as JSON"),
        ("tokenizer_config.json", '{"chat_template": 5}', "tokenizer_config.json: chat_template has no template named"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag"}]}', "no template named default"),
        ("chat_template.json", "[]", "chat_template.json: holds a JSON list"),
        ("chat_template.jinja", "a\n{% if %}", "chat template, line 2: "),
    ],
)
def test_damaged_tokenizer_files_are_refused_in_one_line(tmp_path, file, content, says):
    write_model_folder(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(StartupError, match=says) as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)

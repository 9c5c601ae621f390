"""Sizes as text, and the bounds that EngineConfig states in one line."""

from typing import Any

import pytest

from engine.config import EngineConfig, parse_bytes
from engine.errors import StartupError
from server.config import ServerConfig


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123456789", 123_456_789),
        ("7b", 7),
        ("2GiB", 2_147_483_648),
        ("2 gib", 2_147_483_648),
        (" 1.5MiB ", 1_572_864),
        ("3KiB", 3072),
        ("500MB", 500_000_000),
        ("0.25gb", 250_000_000),
        ("4k", 4000),
        ("4m", 4_000_000),
        ("1G", 1_000_000_000),
        ("9007199254740993", 9_007_199_254_740_993),  # 2**53 + 1: no double holds it
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 TiB", "1,5GiB", "1.GiB", "0x10", "nan", "inf", "1 2"])
def test_parse_bytes_says_what_it_takes(text: str) -> None:
    with pytest.raises(ValueError, match="KiB, MiB, GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_tokens": 16}, "--page-tokens is 16; it must be 32, 64 or 128"),
        ({"page_tokens": 65}, "--page-tokens is 65; it must be 32, 64 or 128"),
        ({"sink_pages": -1}, "--sink-pages is -1; it must be at least 0"),
        ({"max_queued_requests": 0}, "--max-queued-requests is 0; it must be at least 1"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0; it must be at least 1"),
        ({"max_model_len": 0}, "--max-model-len is 0; it must be at least 1"),
        ({"kv_memory": 0}, "--kv-memory is 0; it must be at least 1"),
        (
            {"max_num_seqs": 8, "page_tokens": 32, "max_step_tokens": 39},
            "--max-step-tokens is 39; with 8 sequences and pages of 32 tokens it must be at least 40",
        ),
    ],
)
def test_bounds_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        EngineConfig(model="m", **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "options",
    [
        {"page_tokens": 32, "max_num_seqs": 8, "max_step_tokens": 40},
        {"page_tokens": 128, "max_num_seqs": 1, "max_step_tokens": 129, "sink_pages": 0},
        {"max_model_len": 1, "kv_memory": 1, "max_queued_requests": 1},
    ],
)
def test_what_just_fits_is_taken(options: dict[str, Any]) -> None:
    config = EngineConfig(model="m", **options)
    assert {name: getattr(config, name) for name in options} == options


@pytest.mark.parametrize("value", [-1.0, 86_400.5, 3e6, 1e20, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["drain_seconds", "step_seconds", "request_seconds", "write_seconds"])
def test_times_that_no_clock_counts(name: str, value: float) -> None:
    with pytest.raises(StartupError, match=rf"^--{name.replace('_', '-')} is .*; it must be .* 86,400$"):
        ServerConfig(**{name: value})
    ServerConfig(**{name: 86_400.0})


@pytest.mark.parametrize("pair", [("http_port", "grpc_port"), ("http_port", "admin_port"), ("admin_port", "grpc_port")])
def test_two_ports_that_are_one(pair: tuple[str, str]) -> None:
    with pytest.raises(StartupError, match="are both 7000; they must differ"):
        ServerConfig(**dict.fromkeys(pair, 7000))  # type: ignore[arg-type]
    ServerConfig(**dict.fromkeys(pair, 0))  # type: ignore[arg-type]

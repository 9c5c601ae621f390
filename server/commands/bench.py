"""`quire bench`: load a server that speaks the OpenAI API, or Quire's gRPC, and tell how fast it answers."""

import argparse
import math
import re
import secrets
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from engine.errors import StartupError
from server.terminal import open_console

if TYPE_CHECKING:
    from server.bench.config import BenchConfig
    from server.bench.load import Load
    from server.options import Commands

DESCRIPTION = (
    "Send requests to a running server, level by level, and print percentiles of the time to the first token and "
    "between tokens, throughput, and failures. It works with any server of the OpenAI API. Prompts are random words, "
    "counted by the server's /tokenize where it has one, else by the usage of two short requests. Latencies are of "
    "requests that were done; rates run from the first send to the last byte of a level."
)
API_KEY = "QUIRE_BENCH_API_KEY"
ENDPOINTS = ("completions", "chat")
DEFAULT_CONCURRENCY = "1,8,32"
DEFAULT_INPUT_TOKENS = 512
MAX_CONCURRENCY = 4096
MAX_RATE = 10_000.0
MAX_COUNT = 10**6
MAX_SECONDS = 10**6
MAX_SEED = 2**63 - 1
STDOUT = "-"


def add(commands: "Commands") -> None:
    parser = commands.add_parser("bench", help="measure a running server under load", description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--url",
        required=True,
        metavar="URL",
        help="the server, as in http://127.0.0.1:8000; with --grpc, HOST:PORT, or grpcs://HOST:PORT for TLS",
    )
    parser.add_argument("--grpc", action="store_true", help="measure quire.v1.InferenceService/Generate instead")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        metavar="N,...",
        help=f"levels: requests that run at the same time (default: {DEFAULT_CONCURRENCY})",
    )
    load.add_argument(
        "--rate",
        metavar="R,...",
        help="levels: requests a second, at random times (Poisson), however many run; instead of --concurrency",
    )
    load.add_argument(
        "--requests",
        metavar="N",
        help="requests of each level (default: 4 x concurrency, or what comes in 30 s at the rate; at least 8)",
    )
    load.add_argument(
        "--max-seconds",
        default="300",
        metavar="S",
        help="bound of each level; what is running then is abandoned and counted as such (default: %(default)s)",
    )
    load.add_argument("--timeout", default="600", metavar="S", help="bound of each request (default: %(default)s)")
    load.add_argument(
        "--no-warm-up",
        action="store_true",
        help="without the request that goes ahead of all levels and is not counted; it also brings the shared part of "
        "the prompts into the server's cache, so that all levels find it there",
    )
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--input-tokens", metavar="N", help=f"length of each prompt, with what the server adds to it "
        f"(default: {DEFAULT_INPUT_TOKENS})"
    )  # fmt: skip
    prompts.add_argument("--output-tokens", default="64", metavar="N", help="tokens to generate (default: %(default)s)")
    prompts.add_argument(
        "--prefix-share",
        metavar="X",
        help="share of each prompt, from 0 to 1, that is the same in all requests of all levels and stands in front; "
        "the rest is different in each, so that a level finds nothing else of earlier ones in a cache (default: 0)",
    )
    prompts.add_argument(
        "--dataset",
        metavar="FILE",
        help='prompts instead of random words: JSON lines with "prompt" or "messages", and "max_tokens" where it is '
        "not --output-tokens; or a JSON list as ShareGPT's, of which the first turns are taken. In order, each level "
        "behind the one before, from the start again where they run out: then caches help",
    )
    prompts.add_argument(
        "--seed",
        metavar="N",
        help="makes the same prompts again, which the server may then have in its cache (default: another in each run)",
    )
    requests = parser.add_argument_group("requests")
    requests.add_argument("--endpoint", default=ENDPOINTS[0], choices=ENDPOINTS, help="(default: %(default)s)")
    requests.add_argument("--model", metavar="NAME", help="model to ask for (default: the server's first)")
    requests.add_argument("--api-key", metavar="KEY", help=f"sent as a bearer token [{API_KEY}]")
    requests.add_argument(
        "--ca", metavar="FILE", help="certificates in PEM that vouch for the server (default: the system's)"
    )
    requests.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="do not ask to go on after the end of the text, for servers that refuse it; outputs may then be shorter",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the results as JSON; - writes them to stdout, without the table"
    )


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config = _config(args, environ)
    if args.json not in (None, STDOUT) and not Path(args.json).absolute().parent.is_dir():
        raise StartupError(f"--json {args.json}: there is no such folder")
    # Here, so that --help and mistakes answer quickly.
    from server.bench.run import run_bench

    return run_bench(config, args.json, output=open_console(), errors=open_console(stderr=True))


def _config(args: argparse.Namespace, environ: Mapping[str, str]) -> "BenchConfig":
    from server.bench.client import ClientOptions
    from server.bench.config import BenchConfig
    from server.bench.endpoints import ChatEndpoint, CompletionEndpoint

    if args.grpc and args.endpoint != ENDPOINTS[0]:
        raise StartupError("--endpoint chat is HTTP's; leave it out or leave out --grpc")
    if args.dataset is not None:
        for flag, given in (("--input-tokens", args.input_tokens), ("--prefix-share", args.prefix_share)):
            if given is not None:
                raise StartupError(
                    f"{flag} is given beside --dataset, which has its own prompts; leave one of them out"
                )
    api_key = args.api_key or environ.get(API_KEY) or None
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise StartupError(f"--api-key or {API_KEY}: it must be made of printable ASCII characters without spaces")
    url = _address(args.url) if args.grpc else _url(args.url)
    return BenchConfig(
        url=url,
        endpoint=None if args.grpc else ChatEndpoint() if args.endpoint == "chat" else CompletionEndpoint(),
        loads=_loads(args.concurrency, args.rate),
        input_tokens=_whole("--input-tokens", args.input_tokens or str(DEFAULT_INPUT_TOKENS), 1, MAX_COUNT * 10),
        output_tokens=_whole("--output-tokens", args.output_tokens, 1, MAX_COUNT * 10),
        prefix_share=_number("--prefix-share", args.prefix_share or "0", 0, 1),
        dataset=args.dataset,
        client=ClientOptions(
            model=args.model,
            api_key=api_key,
            ignore_eos=not args.no_ignore_eos,
            timeout=_number("--timeout", args.timeout, 0.001, MAX_SECONDS),
            ca=None if args.ca is None else _certificates(args.ca, url),
        ),
        requests=None if args.requests is None else _whole("--requests", args.requests, 1, MAX_COUNT),
        max_seconds=_number("--max-seconds", args.max_seconds, 0.001, MAX_SECONDS),
        seed=secrets.randbelow(2**32) if args.seed is None else _whole("--seed", args.seed, 0, MAX_SEED),
        warm_up=not args.no_warm_up,
    )


def _loads(concurrency: str | None, rate: str | None) -> tuple["Load", ...]:
    from server.bench.load import ClosedLoop, OpenLoop

    if rate is None:
        items = _listed("--concurrency", concurrency or DEFAULT_CONCURRENCY)
        return tuple(ClosedLoop(_whole("--concurrency", item, 1, MAX_CONCURRENCY)) for item in items)
    if concurrency is not None:
        raise StartupError("--rate is given beside --concurrency; leave one of them out")
    return tuple(OpenLoop(_number("--rate", item, 0.001, MAX_RATE)) for item in _listed("--rate", rate))


def _listed(flag: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise StartupError(f"{flag} is {text!r}; it must be numbers separated by commas")
    return items


def _whole(flag: str, text: str, least: int, most: int) -> int:
    value = int(text) if re.fullmatch(r"[0-9]{1,20}", text) else -1
    if not least <= value <= most:
        raise StartupError(f"{flag} has {text!r}; it must be a whole number from {least} to {most}")
    return value


def _number(flag: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise StartupError(f"{flag} has {text!r}; it must be a number from {least:g} to {most:g}")
    return value


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
        _ = parts.port  # raises for one that is none
    except ValueError:
        is_good = False
    if not is_good:
        raise StartupError(f"--url is {text!r}; it must be http://HOST:PORT or https://HOST:PORT; gRPC takes --grpc")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _address(text: str) -> str:
    scheme, found, address = text.rpartition("://")
    match = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", address)
    if match is None or not 1 <= int(match[2]) <= 65535 or (found and scheme not in ("grpc", "grpcs")):
        raise StartupError(f"--url is {text!r}; with --grpc it must be HOST:PORT or, for TLS, grpcs://HOST:PORT")
    return f"{scheme or 'grpc'}://{address}"


def _certificates(file: str, url: str) -> str:
    if not url.startswith(("https://", "grpcs://")):
        raise StartupError(f"--ca is given, but --url is {url}, which has no TLS; take https:// or grpcs://")
    try:
        text = Path(file).read_text(encoding="ascii")
        ssl.create_default_context(cadata=text)
    except (ssl.SSLError, ValueError):
        raise StartupError(f"--ca {file}: no certificates in PEM") from None
    except OSError as error:
        raise StartupError(f"--ca {file}: {error.strerror}") from None
    return text

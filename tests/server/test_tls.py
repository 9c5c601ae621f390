"""TLS on both ports: what is refused at start, who gets in, and certificates replaced while the server runs."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
import trustme

from engine.errors import StartupError
from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1 import inference_pb2_grpc as pb_grpc
from server.cli import main
from server.config import ServerConfig
from server.grpc import GrpcServer
from server.http import build_app
from server.ports import bind_grpc, bind_http
from server.service import Service
from server.tls import Certificates
from server.web import http_server
from tests.server.conftest import LIMITS
from tests.server.wire import COMPLETION


class Files:
    """Certificate files as an operator has them, issued by `ca`."""

    def __init__(self, folder: Path):
        self.ca = trustme.CA()
        self.cert, self.key, self.client_ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        self.issue(self.ca)
        self.ca.cert_pem.write_to_path(self.client_ca)

    def issue(self, ca: trustme.CA) -> None:
        made = ca.issue_cert("127.0.0.1", "localhost")
        self.cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        made.private_key_pem.write_to_path(self.key)

    def config(self, **more: str) -> ServerConfig:
        return ServerConfig(http_port=0, grpc_port=0, tls_cert=str(self.cert), tls_key=str(self.key), **more)  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


class Secure:
    """Both ports of a server with certificates."""

    def __init__(self, http_port: int, grpc_port: int, certificates: Certificates):
        self.url, self.grpc, self.certificates = (
            f"https://127.0.0.1:{http_port}",
            f"127.0.0.1:{grpc_port}",
            certificates,
        )

    async def post(self, context: ssl.SSLContext) -> int:
        async with httpx.AsyncClient(base_url=self.url, verify=context) as client:
            return (await client.post("/v1/completions", json=COMPLETION)).status_code

    async def generate(self, credentials: grpc.ChannelCredentials) -> int:
        """The number of messages. Raises AioRpcError UNAVAILABLE where the handshake fails."""
        async with grpc.aio.secure_channel(self.grpc, credentials) as channel:
            call = pb_grpc.InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(model="tiny", text="x"), timeout=10
            )
            return len([message async for message in call])


async def serve(config: ServerConfig, service: Service) -> AsyncIterator[Secure]:
    certificates = Certificates.of(config)
    assert certificates is not None
    grpc_server = GrpcServer(LIMITS)
    grpc_port = bind_grpc(grpc_server, config, certificates.grpc_credentials())
    await grpc_server.start(service)
    server = http_server(build_app(service), LIMITS, certificates.context)
    with bind_http(config) as socket:
        task = asyncio.create_task(server.serve(sockets=[socket]))
        while not server.started:
            await asyncio.sleep(0.001)
        yield Secure(socket.getsockname()[1], grpc_port, certificates)
        server.should_exit = True
        await task
    await grpc_server.stop(0)


@pytest.fixture
async def secure(files: Files, service: Service) -> AsyncIterator[Secure]:
    async for running in serve(files.config(), service):
        yield running


@pytest.fixture
async def mutual(files: Files, service: Service) -> AsyncIterator[Secure]:
    async for running in serve(files.config(tls_client_ca=str(files.client_ca)), service):
        yield running


def trusting(ca: trustme.CA, identity: trustme.LeafCert | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    if identity is not None:
        identity.configure_cert(context)
    return context


def grpc_trusting(ca: trustme.CA, identity: trustme.LeafCert | None = None) -> grpc.ChannelCredentials:
    key = None if identity is None else identity.private_key_pem.bytes()
    chain = None if identity is None else identity.cert_chain_pems[0].bytes()
    return grpc.ssl_channel_credentials(ca.cert_pem.bytes(), key, chain)


async def test_both_ports_speak_tls(secure: Secure, files: Files) -> None:
    assert await secure.post(trusting(files.ca)) == 200
    assert await secure.generate(grpc_trusting(files.ca)) > 0
    stranger = trustme.CA()
    with pytest.raises(httpx.ConnectError):
        await secure.post(trusting(stranger))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await secure.generate(grpc_trusting(stranger))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_bench_trusts_whom_it_is_told_to(
    secure: Secure, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--concurrency", "1", "--requests", "2", "--input-tokens", "12", "--output-tokens", "2", "--json", "-"]
    for where in (["--url", secure.url], ["--url", f"grpcs://{secure.grpc}", "--grpc"]):
        trusted = ["bench", *where, *few, "--ca", str(files.client_ca)]
        assert await asyncio.to_thread(main, trusted, {}) == 0
        assert json.loads(capsys.readouterr().out)["levels"][0]["num_done"] == 2
        assert await asyncio.to_thread(main, ["bench", *where, *few], {}) == 2
        assert "certificate" in capsys.readouterr().err.lower()


async def test_plain_text_gets_no_answer_from_a_secure_port(secure: Secure) -> None:
    async with httpx.AsyncClient(base_url=secure.url.replace("https", "http")) as client:
        with pytest.raises(httpx.TransportError):
            await client.get("/health/live")


async def test_old_versions_of_tls_are_refused(secure: Secure, files: Files) -> None:
    context = trusting(files.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        await secure.post(context)


async def test_clients_need_a_certificate_of_the_given_authority(mutual: Secure, files: Files) -> None:
    known, unknown = files.ca.issue_cert("client"), trustme.CA().issue_cert("client")
    assert await mutual.post(trusting(files.ca, known)) == 200
    assert await mutual.generate(grpc_trusting(files.ca, known)) > 0
    for identity in (None, unknown):
        with pytest.raises(httpx.TransportError):
            await mutual.post(trusting(files.ca, identity))
        with pytest.raises(grpc.aio.AioRpcError):
            await mutual.generate(grpc_trusting(files.ca, identity))


async def test_a_replaced_certificate_is_taken(secure: Secure, files: Files) -> None:
    successor = trustme.CA()
    files.issue(successor)
    secure.certificates.refresh()
    assert await secure.post(trusting(successor)) == 200
    assert await secure.generate(grpc_trusting(successor)) > 0
    with pytest.raises(httpx.ConnectError):
        await secure.post(trusting(files.ca))


async def test_a_pair_that_does_not_fit_changes_nothing(secure: Secure, files: Files) -> None:
    key = files.key.read_bytes()
    files.issue(files.ca)
    files.key.write_bytes(key)  # as while an operator copies one file after the other
    secure.certificates.refresh()
    assert await secure.post(trusting(files.ca)) == 200
    assert await secure.generate(grpc_trusting(files.ca)) > 0
    files.issue(files.ca)
    secure.certificates.refresh()
    assert await secure.post(trusting(files.ca)) == 200


async def test_files_that_change_while_they_are_read(
    secure: Secure, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check of a pair and its use it is another one: the server goes on, and takes what comes after."""
    check = Certificates._new_context

    def check_and_change(certificates: Certificates) -> ssl.SSLContext:
        context = check(certificates)
        files.key.write_bytes(trustme.CA().issue_cert("other").private_key_pem.bytes())
        return context

    files.issue(files.ca)
    with monkeypatch.context() as patch:
        patch.setattr(Certificates, "_new_context", check_and_change)
        secure.certificates.refresh()
    files.issue(files.ca)
    secure.certificates.refresh()
    assert await secure.post(trusting(files.ca)) == 200


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
@pytest.mark.parametrize("content", [b"", b"not a certificate", None])
def test_files_that_cannot_be_used_are_one_line(files: Files, which: str, content: bytes | None) -> None:
    path = getattr(files, which)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(StartupError) as caught:
        Certificates.of(files.config(tls_client_ca=str(files.client_ca)))
    message = str(caught.value)
    assert path.name in message and "\n" not in message


def test_options_that_belong_together(files: Files) -> None:
    for wrong in ({"tls_cert": "c"}, {"tls_key": "k"}, {"tls_client_ca": "a"}):
        with pytest.raises(StartupError, match="--tls-"):
            ServerConfig(**wrong)  # type: ignore[arg-type]

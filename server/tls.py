"""Certificates for both ports, read again when their files change."""

import logging
import ssl
from pathlib import Path

import grpc

from engine.errors import StartupError
from server.config import ServerConfig
from server.watched_files import Stamp, read_file, stamp_of

log = logging.getLogger(__name__)

CERT, KEY, CLIENT_CA = "--tls-cert", "--tls-key", "--tls-client-ca"


class Certificates:
    """The files of --tls-cert, --tls-key and --tls-client-ca. Raises StartupError where they cannot be used.

    New connections get a new certificate and key as soon as both files fit together. The client CA is read at start.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None):
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._stamp = self._stamps()
        self.context = self._new_context()
        self._grpc_stamp = self._stamp

    @classmethod
    def of(cls, config: ServerConfig) -> "Certificates | None":
        """None where the server speaks plain text."""
        if config.tls_cert is None or config.tls_key is None:
            return None
        client_ca = None if config.tls_client_ca is None else Path(config.tls_client_ca)
        return cls(Path(config.tls_cert), Path(config.tls_key), client_ca)

    def refresh(self) -> None:
        """Take the files again if they have changed. Files that cannot be used change nothing, and the log says why."""
        stamp = self._stamps()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._new_context()  # a pair that does not fit would leave half of itself in the context in use
            self.context.load_cert_chain(self._cert, self._key)
            log.info("read --tls-cert and --tls-key again")
        except (StartupError, OSError) as error:
            # Also where they change while they are read: then they have another stamp next time.
            log.error("the certificate stays as it was: %s", error)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials that ask for the files at each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(),
            self._changed_grpc_configuration,
            require_client_authentication=self._client_ca is not None,
        )

    def _changed_grpc_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC on a thread of its own; None: nothing has changed."""
        stamp = self._stamps()
        if stamp == self._grpc_stamp:
            return None
        self._grpc_stamp = stamp
        try:
            self._new_context()  # checks that the pair fits
            return self._grpc_configuration()
        except (StartupError, OSError) as error:
            log.error("the certificate of gRPC stays as it was: %s", error)
            return None

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        roots = None if self._client_ca is None else read_file(CLIENT_CA, self._client_ca)
        pair = (read_file(KEY, self._key), read_file(CERT, self._cert))
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for option, path in ((CERT, self._cert), (KEY, self._key)):
            read_file(option, path)  # OpenSSL would not say which of them
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError) as error:
            raise StartupError(f"{CERT} {self._cert}, {KEY} {self._key}: {_reason(error)}") from None
        if self._client_ca is not None:
            read_file(CLIENT_CA, self._client_ca)
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as error:
                raise StartupError(f"{CLIENT_CA} {self._client_ca} has no certificates in PEM ({error})") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _stamps(self) -> tuple[Stamp | None, Stamp | None]:
        return stamp_of(self._cert), stamp_of(self._key)


def _no_password() -> str:
    raise ValueError("the key is encrypted; give it without a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a certificate and key in PEM that belong together ({error.reason or error})"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)

"""Who may ask, and what for: keys from a file, one tenant each."""

import hashlib
import hmac
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ErrorKind, RequestError, StartupError
from server.watched_files import read_file, stamp_of

log = logging.getLogger(__name__)

OPTION = "--api-keys"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
COUNT = re.compile(r"[1-9][0-9]{0,11}")
LIMITS = ("requests", "tokens_per_minute")
LINE = "NAME KEY [requests=N] [tokens_per_minute=N]"
MIN_KEY_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whoever holds one key. Its requests share cached pages with no other tenant's: `salt` sets them apart.

    `max_requests`: how many may be open at once; `tokens_per_minute`: of prompts and output together. None: no limit.
    """

    name: str
    salt: str
    max_requests: int | None = None
    tokens_per_minute: int | None = None


ANYONE = Tenant(name="-", salt="")


class OpenDoor:
    """Where no keys are set: everybody is the same tenant."""

    def tenant(self, authorization: str | None) -> Tenant:
        return ANYONE


class KeyFile:
    """The keys in a file, read again when the file changes. Keys are kept as hashes only.

    Raises StartupError where the file cannot be read, has no key, or a line is wrong.
    """

    def __init__(self, path: Path):
        self._path = path
        self._stamp = stamp_of(path)
        self._tenants = self._read()

    def tenant(self, authorization: str | None) -> Tenant:
        """Whose key an `Authorization` header carries. Raises RequestError UNAUTHENTICATED."""
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            message = "this server needs a key; send it as `Authorization: Bearer KEY`"
            raise RequestError(ErrorKind.UNAUTHENTICATED, message, code="missing_api_key")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: Tenant | None = None
        for digest, tenant in self._tenants.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(given, digest):
                found = tenant
        if found is None:
            raise RequestError(ErrorKind.UNAUTHENTICATED, "this key is not known here", code="invalid_api_key")
        return found

    def _refresh(self) -> None:
        """A file that is wrong now changes nothing: the keys read before stay, and the log says why."""
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tenants = self._read()
            log.info("read %d keys again from %s", len(self._tenants), OPTION)
        except StartupError as error:
            log.error("the keys stay as they were: %s", error)

    def _read(self) -> dict[bytes, Tenant]:
        try:
            text = read_file(OPTION, self._path).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise StartupError(f"{OPTION} {self._path} is not UTF-8 text") from None
        tenants: dict[bytes, Tenant] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            digest, tenant = _parse(words, f"{OPTION} {self._path}, line {number}")
            if digest in tenants or any(other.name == tenant.name for other in tenants.values()):
                raise StartupError(f"{OPTION} {self._path}, line {number}: its name or key stands above already")
            tenants[digest] = tenant
        if not tenants:
            raise StartupError(f"{OPTION} {self._path} has no key; write a line `{LINE}` for each")
        return tenants


def _parse(words: list[str], where: str) -> tuple[bytes, Tenant]:
    """A line of the file. Messages never repeat a key."""
    if len(words) < 2 or not NAME.fullmatch(words[0]):
        raise StartupError(f"{where} is not `{LINE}`, with a name of letters, digits and . _ -")
    name, key, *options = words
    if match := DIGEST.fullmatch(key):
        digest = bytes.fromhex(match[1])
    elif key.startswith("sha256:") or len(key) < MIN_KEY_CHARS or not key.isascii():
        bound = f"at least {MIN_KEY_CHARS} characters, all of them ASCII"
        raise StartupError(f"{where}: a key has {bound}, or is sha256: and 64 hex digits")
    else:
        digest = hashlib.sha256(key.encode()).digest()
    limits: dict[str, int] = {}
    for option in options:
        limit, _, value = option.partition("=")
        if limit not in LIMITS or limit in limits or not COUNT.fullmatch(value):
            raise StartupError(f"{where}: after the key may stand requests=N and tokens_per_minute=N, N at least 1")
        limits[limit] = int(value)
    salt = hmac.new(digest, b"quire prefix salt", hashlib.sha256).hexdigest()
    return digest, Tenant(
        name=name,
        salt=salt,
        max_requests=limits.get("requests"),
        tokens_per_minute=limits.get("tokens_per_minute"),
    )

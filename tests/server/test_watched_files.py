"""Keys and certificates that the server's user may not read: at start, and while it serves."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from engine.errors import RequestError, StartupError
from server.keys import KeyFile
from server.tls import Certificates
from tests.rights import shared_folder, without_rights

OLD, NEW = "old-key-0123456789ab", "new-key-0123456789ab"


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as path:
        yield path


def write(path: Path, content: bytes, mode: int) -> Path:
    """In place of what is there, as `mv` does."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.chmod(mode)
    return new.replace(path)


def knows(keys: KeyFile, key: str) -> bool:
    try:
        keys.tenant(f"Bearer {key}")
    except RequestError:
        return False
    return True


def test_keys_count_as_soon_as_they_may_be_read(folder: Path) -> None:
    path = write(folder / "keys", f"alice {OLD}\n".encode(), 0o644)
    keys = KeyFile(path)
    with without_rights():
        assert knows(keys, OLD)
    write(path, f"alice {NEW}\n".encode(), 0o600)
    with without_rights():
        assert knows(keys, OLD) and not knows(keys, NEW)
    path.chmod(0o644)
    with without_rights():
        assert knows(keys, NEW) and not knows(keys, OLD)


def test_a_key_file_that_is_gone_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "keys", f"alice {OLD}\n".encode(), 0o644)
    keys = KeyFile(path)
    aside = path.rename(tmp_path / "aside")
    assert all(knows(keys, OLD) for _ in range(20)) and caplog.text.count("the keys stay as they were") == 1
    aside.rename(path)
    assert knows(keys, OLD)
    path.unlink()
    assert all(knows(keys, OLD) for _ in range(20)) and caplog.text.count("the keys stay as they were") == 2


def test_a_key_file_from_windows(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", b"\xef\xbb\xbfalice " + OLD.encode() + b"\r\nbob " + NEW.encode() + b"\r\n", 0o644)
    assert KeyFile(path).tenant(f"Bearer {OLD}").name == "alice" and knows(KeyFile(path), NEW)


def test_a_file_that_cannot_hold_keys_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "keys").open("wb") as file:
        file.truncate(3 * 2**30)
    with pytest.raises(StartupError, match=r"^--api-keys .*keys has 3221225472 bytes; it may have 1048576$"):
        KeyFile(tmp_path / "keys")


def test_what_may_not_be_read_is_one_line(folder: Path) -> None:
    pair = trustme.CA().issue_cert("localhost")
    cert = write(folder / "tls.crt", pair.cert_chain_pems[0].bytes(), 0o644)
    key = write(folder / "tls.key", pair.private_key_pem.bytes(), 0o600)
    keys = write(folder / "keys", f"alice {OLD}\n".encode(), 0o600)
    authority = write(folder / "ca.crt", cert.read_bytes(), 0o600)
    for option, path in (("--tls-key", key), ("--tls-client-ca", authority), ("--api-keys", keys)):
        with without_rights() as user, pytest.raises(StartupError) as caught:
            if option == "--api-keys":
                KeyFile(path)
            else:
                Certificates(cert, key, authority)
        says = str(caught.value)
        assert says.startswith(f"{option} {path}: user {user} may not read it") and "chmod 640" in says
        assert "\n" not in says
        path.chmod(0o644)


def test_a_certificate_counts_as_soon_as_its_key_may_be_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = trustme.CA()

    def renew(key_mode: int) -> None:
        pair = authority.issue_cert("localhost")
        write(folder / "tls.key", pair.private_key_pem.bytes(), key_mode)
        write(folder / "tls.crt", pair.cert_chain_pems[0].bytes(), 0o644)

    renew(0o644)
    certificates = Certificates(folder / "tls.crt", folder / "tls.key", None)
    renew(0o600)
    with caplog.at_level("INFO"), without_rights():
        certificates.refresh()
        assert "the certificate stays as it was" in caplog.text and "may not read it" in caplog.text
        certificates.refresh()
        assert "again" not in caplog.text
    (folder / "tls.key").chmod(0o644)
    with caplog.at_level("INFO"), without_rights():
        certificates.refresh()
    assert "read --tls-cert and --tls-key again" in caplog.text

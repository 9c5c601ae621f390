"""An index whose checksum is right and whose content is not."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.format.layout import Pool
from tests.engine.archives import LAYOUT, TREE, Warnings, read

pytestmark = pytest.mark.usefixtures("small_shards")


def signed(index: Any) -> bytes:
    """An index with a right checksum, whatever it says."""
    if not isinstance(index, dict):
        body = json.dumps(index).encode()
        return body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    index = {key: value for key, value in index.items() if key != "sha256"}
    body = json.dumps(index).encode()[:-1] + b", "
    return body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def test_the_tests_sign_as_the_archive_does(folder: Path, tmp_path: Path) -> None:
    path = folder / "index.json"
    path.write_bytes(signed(json.loads(path.read_bytes())))
    assert read(tmp_path) == TREE.contents


CHILD = next(index for index, page in enumerate(TREE.pages) if page.parent is not None)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["version"], 2),
        (["version"], None),
        (["model"], ["m"]),
        (["page_bytes"], 2**70),
        (["pages"], None),
        (["pages"], {"0": {}}),
        (["pages"], [[]]),
        (["pages", 0], None),
        (["pages", 0], []),
        (["pages", CHILD, "parent"], CHILD),
        (["pages", CHILD, "parent"], CHILD + 1),
        (["pages", CHILD, "parent"], 2**70),
        (["pages", CHILD, "parent"], -1),
        (["pages", CHILD, "parent"], True),
        (["pages", CHILD, "parent"], 0.0),
        (["pages", CHILD, "parent"], None),  # a sealed page where a sink page belongs
        (["pages", CHILD, "salt"], "of somebody else"),
        (["pages", 0, "salt"], None),
        (["pages", 0, "salt"], 7),
        (["pages", 0, "tokens"], [1, 2, 3]),
        (["pages", 0, "tokens"], [1, 2, 3, 4, 5]),
        (["pages", 0, "tokens"], [1, 2, 3, "4"]),
        (["pages", 0, "tokens"], [1, 2, 3, 4.0]),
        (["pages", 0, "tokens"], [1, 2, 3, -4]),
        (["pages", 0, "tokens"], [1, 2, 3, 2**63]),
        (["pages", 0, "tokens"], [1, 2, 3, False]),
        (["pages", 0, "tokens"], "1234"),
        (["pages", 0, "pool"], "sealed"),
        (["pages", CHILD, "pool"], "open"),
        (["pages", 0, "pool"], "host"),
        (["pages", 0, "pool"], ["open"]),
        (["pages", 0, "pool"], None),
        (["pages", 0, "priority"], 2**31),
        (["pages", 0, "priority"], "0"),
        (["pages", 0, "num_hits"], -1),
        (["pages", 0, "num_hits"], 2**63),
        (["pages", 0, "num_hits"], None),
        (["pages", 0, "sha256"], None),
        (["pages", 0, "more"], 1),
    ],
)
def test_a_signed_index_that_says_nonsense_is_not_used(
    keys: list[Any], value: Any, folder: Path, tmp_path: Path, warnings: Warnings
) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_bytes())
    place = index
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_bytes(signed(index))
    assert read(tmp_path) == []
    warnings.one("pages on disk are not used", str(path))


@pytest.mark.parametrize("field", ["parent", "salt", "tokens", "pool", "priority", "num_hits", "sha256"])
def test_a_signed_index_without_a_field_is_not_used(
    field: str, folder: Path, tmp_path: Path, warnings: Warnings
) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_bytes())
    del index["pages"][1][field]
    path.write_bytes(signed(index))
    assert read(tmp_path) == []
    warnings.one("page 1 is malformed", str(path))


@pytest.mark.parametrize(
    "body", [b"", b"[" * 100_000, b"[1, 2], ", b'{"version": 1' + b"0" * 5000 + b", ", b"\xff\xfe"]
)
def test_a_signed_index_that_is_no_index_is_not_used(
    body: bytes, folder: Path, tmp_path: Path, warnings: Warnings
) -> None:
    path = folder / "index.json"
    path.write_bytes(body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n')
    assert read(tmp_path) == []
    warnings.one("it is not JSON", str(path))


@pytest.mark.parametrize("count", [0, 1, len(TREE.pages) - 1, len(TREE.pages) + 1, 10_000])
def test_an_index_with_another_number_of_pages(count: int, folder: Path, tmp_path: Path, warnings: Warnings) -> None:
    """Whatever is given out has the bytes that its checksum names."""
    path = folder / "index.json"
    index = json.loads(path.read_bytes())
    index["pages"] = (index["pages"] + 10_000 * index["pages"][:1])[:count]
    path.write_bytes(signed(index))
    contents = read(tmp_path)
    assert contents == TREE.contents[: len(contents)]
    if count:
        warnings.one(f"of {count} pages on disk are not used", "expected")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_signed_index_is_safe(data: st.DataObject, folder: Path, tmp_path: Path, warnings: Warnings) -> None:
    """Replace one value somewhere by any other: pages that are given out are sound, and a loss is told once."""
    path = folder / "index.json"
    whole = path.read_bytes()
    index = json.loads(whole)
    place, key = index, data.draw(st.sampled_from(sorted(index)))
    while isinstance(place[key], list | dict) and place[key] and data.draw(st.integers(0, 4)):
        place = place[key]
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(list(keys)))
    place[key] = data.draw(VALUES | st.integers(-2, 20))
    path.write_bytes(signed(index))
    checksums = {hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in TREE.data}
    contents = read(tmp_path)
    for number, (page, part) in enumerate(contents):
        assert page.parent is None or 0 <= page.parent < number
        assert len(page.tokens) == LAYOUT.page_tokens and isinstance(page.salt, str)
        assert len(part) == (LAYOUT.slot_bytes if page.pool is Pool.OPEN else LAYOUT.page_bytes)
        assert hashlib.sha256(part).hexdigest() in checksums
    found = warnings.take()
    assert len(found) <= 1
    assert found or len(contents) == len(index["pages"])
    path.write_bytes(whole)

"""Models by their names on a hub: what is read of them, brought into the usual cache with `huggingface_hub`.

The library is imported only where it is needed: models in folders start without it. It listens to HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE.
"""

import errno
import logging
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path, PurePath
from types import FrameType
from typing import Any

from engine.errors import StartupError
from engine.model.describe import describe
from engine.model.folder import INDEX, read_index, read_json_object

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
WEIGHTS = ".safetensors"
WHOLE = "model" + WEIGHTS
NEEDED = ("config.json", "tokenizer.json")
DESCRIPTION = (
    *NEEDED, "generation_config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", INDEX
)  # fmt: skip
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_ENTRY = (errno.EACCES, errno.EPERM, errno.EROFS)
REASON_CHARS = 200


class _NoAnswer(Exception):
    """No hub answers: there is no network, it is down, or something else stands in its place."""


def is_hub_name(model: str) -> bool:
    return NAME.fullmatch(model) is not None


def fetch(name: str, revision: str | None) -> Path:
    """The folder in the cache that holds a model. What is missing is downloaded, small files first, so that a model
    that cannot be served is refused before its weights come. Where no hub answers, the cache has to do.

    Raises StartupError.
    """
    try:
        files = _list_files(name, revision)
        _check_files(name, files)
        folder = _snapshot(name, revision, [file for file in DESCRIPTION if file in files])
        describe(read_json_object(folder / "config.json"))
        weights = _weights(files, folder)
        _check_room(name, folder, sum(files[file] for file in weights if not (folder / file).exists()))
        return _snapshot(name, folder.name, weights)  # of the same commit, whatever is pushed meanwhile
    except StartupError:
        raise
    except _NoAnswer as silence:
        folder = _from_cache(name, revision, DESCRIPTION, str(silence))
        if not any(folder.glob(f"*{WEIGHTS}")):  # where a download ended early; an index says more of what is missing
            raise _not_cached(name, revision, str(silence)) from None
        return folder
    except Exception as error:  # the library's, or of HTTP or the disk below it: no list of them would be whole
        raise StartupError(_explain(error, name, revision)) from error


def fetch_config(name: str, revision: str | None = None) -> Path:
    """Only the config.json of a model, wherever `fetch` would take it from. Raises StartupError."""
    try:
        _list_files(name, revision)
        return _snapshot(name, revision, NEEDED[:1]) / NEEDED[0]
    except _NoAnswer as silence:
        return _from_cache(name, revision, NEEDED[:1], str(silence)) / NEEDED[0]
    except Exception as error:
        raise StartupError(_explain(error, name, revision)) from error


def _list_files(name: str, revision: str | None) -> dict[str, int]:
    """The bytes of each file of a model. Raises _NoAnswer, or the library's errors where the hub refuses."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    # A line for each request, and with addresses that may be signed, is for nobody's log.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    try:
        # In its other calls the library waits without end for a hub that says nothing.
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=timeout)
    except HFValidationError:
        raise
    except OfflineModeIsEnabled:
        raise _NoAnswer("HF_HUB_OFFLINE is set; unset it") from None
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        raise _NoAnswer(f"{constants.ENDPOINT} answers {error.response.status_code}; try again later") from error
    except Exception as error:
        raise _NoAnswer(
            f"{constants.ENDPOINT} does not answer as a hub ({_kind(error)}); check the network and HF_ENDPOINT"
        ) from error
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _from_cache(name: str, revision: str | None, files: Sequence[str], reason: str) -> Path:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(name, revision, files, is_offline=True)
    except LocalEntryNotFoundError:
        raise _not_cached(name, revision, reason) from None
    except Exception as error:
        raise StartupError(_explain(error, name, revision)) from error


def _not_cached(name: str, revision: str | None, reason: str) -> StartupError:
    whole = "model" if revision is None else f"model of revision {_short(revision)}"
    return StartupError(
        f"there is no folder {name}, the cache holds no whole {whole} of that name, and {reason}, or name a folder"
    )


def _check_files(name: str, files: Mapping[str, int]) -> None:
    """Refuse a model without files that no model is read without."""
    if INDEX not in files and not any("/" not in file and file.endswith(WEIGHTS) for file in files):
        other = next((file for file in files if PurePath(file).suffix in (".bin", ".pt", ".pth", ".gguf")), None)
        has = f", only {other}" if other else ""
        raise StartupError(f"{name} has no *{WEIGHTS}{has}; name a model, or a --revision of it, that has them")
    for file in NEEDED:
        if file not in files:
            raise StartupError(f"{name} has no {file}; name a model, or a --revision of it, that has one")


def _weights(files: Mapping[str, int], folder: Path) -> list[str]:
    """Those that a `FolderCheckpoint` opens."""
    if INDEX in files:
        return [file for file in read_index(folder) if file in files]
    return [WHOLE] if WHOLE in files else [file for file in files if "/" not in file and file.endswith(WEIGHTS)]


def _check_room(name: str, folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StartupError(
            f"the weights of {name} take {num_bytes} bytes more, and {free} are free at {folder}; make room, or set "
            "HF_HOME to a folder on another disk"
        )


def _snapshot(name: str, revision: str | None, files: Sequence[str], *, is_offline: bool = False) -> Path:
    """The cached folder with these files, as far as the model has them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    stop = threading.Event()
    bars: list[Any] = []

    class Bar(tqdm):
        """Ends a download: the library itself waits until its threads are through with their files. And can be closed,
        which the library leaves to the garbage collector: by then something else may stand in the terminal."""

        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]
            bars.append(self)

        def update(self, n: float | None = 1) -> Any:
            if stop.is_set():
                raise InterruptedError
            return super().update(n)

    # The library takes patterns, which are matched with whole paths.
    patterns = [re.sub(r"([*?[])", r"[\1]", file) for file in files]
    with _on_signal(stop.set), _progress_bars(any(file.endswith(WEIGHTS) for file in files)):
        try:
            folder = snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=is_offline, tqdm_class=Bar
            )
        finally:
            for bar in bars:
                bar.close()
    return Path(folder)


@contextmanager
def _on_signal(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` when a signal that ends the process comes, before its handler."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def hear(handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
        tell()
        handler(number, frame)

    # Elsewhere than in the main thread nobody can listen.
    is_main = threading.current_thread() is threading.main_thread()
    heard = {number: handler for number, handler in handlers.items() if is_main and callable(handler)}
    for number, handler in heard.items():
        signal.signal(number, partial(hear, handler))
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


def _progress_bars(is_wanted: bool) -> AbstractContextManager[object]:
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    is_free = constants.HF_HUB_DISABLE_PROGRESS_BARS is None  # else the variable has said it
    return disable_progress_bars() if is_free and not (is_wanted and sys.stderr.isatty()) else nullcontext()


def _explain(error: Exception, name: str, revision: str | None) -> str:
    """One line: what was wrong and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # what the library says of it is about caches, not about what was wrong
    match error:
        case HFValidationError():
            return f"there is no folder {name}, and no model of a hub can have that name; check it"
        case GatedRepoError():
            return f"{name} is gated; ask for access at {hub}/{name}, and set HF_TOKEN to a token of that account"
        case RepositoryNotFoundError():
            return (
                f"there is no folder {name}, and {hub} shows no model of that name; check it, or set HF_TOKEN to a "
                "token that may read it"
            )
        case RevisionNotFoundError():
            return f"{name} has no revision {_short(revision or constants.DEFAULT_REVISION)} at {hub}; check --revision"
        case HfHubHTTPError(response=response) if response.status_code in (401, 403):
            return f"{hub} answers {response.status_code} for {name}; set HF_TOKEN to a token that may read it"
        case HfHubHTTPError(response=response):
            return f"{hub} answers {response.status_code} for {name}; try again later"
        case OSError(errno=number) if number in NO_ROOM:
            return f"{cache}: the disk is full; make room, or set HF_HOME to a folder on another disk"
        case OSError(errno=number) if number in NO_ENTRY:
            return f"{cache} cannot be written ({error.strerror}); set HF_HOME to a folder that can be"
    return f"{name} could not be downloaded from {hub} ({_kind(error)}); the same command tries again"


def _kind(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0][:REASON_CHARS]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _short(text: str) -> str:
    return repr(text if len(text) <= REASON_CHARS else text[:REASON_CHARS] + "...")

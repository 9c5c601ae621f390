"""What the commands write to a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


def open_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console that writes text as it is: names of files and models may hold what rich reads as markup."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def widen(output: Console, least: int) -> None:
    """Room for wide tables where the output is no terminal: rich takes 80 columns there."""
    if output.width < least and not output.is_terminal:
        output.width = least


class Bar:
    """A progress bar over the `total` units of a run; `name` says what is being done."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def expect(self, total: int) -> None:
        self._progress.start()  # not before: a download shows bars of its own
        self._progress.update(self._task, total=total)

    def advance(self, name: str, count: int) -> None:
        self._progress.update(self._task, advance=count, description=name)


@contextmanager
def progress_bar(errors: Console) -> Iterator[Bar]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=errors)
    try:
        yield Bar(progress)
    finally:
        progress.stop()

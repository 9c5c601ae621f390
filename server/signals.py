"""What a signal does to a process that has nothing to finish."""

import signal


def exit_on(*numbers: signal.Signals) -> None:
    """Let these signals end the process. SIGHUP stays ignored where it is: that is what nohup is for."""
    for number in numbers:
        if number is not signal.SIGHUP or is_hangup_heard():
            signal.signal(number, exit_now)


def is_hangup_heard() -> bool:
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def exit_now(number: int, frame: object) -> None:
    """A handler that unwinds, so that temporary files go; the exit code is a shell's for that signal."""
    raise SystemExit(128 + number)

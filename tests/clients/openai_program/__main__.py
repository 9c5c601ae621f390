"""Run by the interpreter of each version of openai-python, without this project: `python openai_program SETTINGS`.

Prints a JSON object: the version, and of every check its traceback, or null where it passed.
"""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import openai
from answers import Answers
from failures import Failures


def outcome(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return None


def run(checks: Any) -> dict[str, str | None]:
    return {name: outcome(getattr(checks, name)) for name in dir(checks) if name.startswith("check_")}


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    outcomes = run(Answers(**settings["answers"])) | run(Failures(**settings["failures"]))
    print(json.dumps({"version": openai.__version__, "checks": outcomes}))

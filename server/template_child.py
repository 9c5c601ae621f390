"""The process that renders chat templates for a server: started by `server.template_worker`, bounded by the system.

Frames on stdin and stdout: four bytes of length, most significant first, and JSON. The first frame says the template
and the bounds; each further one is a prompt. Ends with stdin. Imports Jinja and the standard library only.
"""

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from engine.chat_template import ChatPrompt, ChatRenderer, ChatTemplate
from engine.errors import RequestError

LENGTH = struct.Struct(">I")


def main() -> None:
    # Of its own: nothing that prints may write between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    setup = read(sys.stdin.buffer)
    if setup is None:
        return
    with contextlib.suppress(ValueError, OSError):  # where the system has no such bound
        resource.setrlimit(resource.RLIMIT_AS, (setup["max_memory"], setup["max_memory"]))
    # Ends the process even in the middle of one long operation, and when there is no parent any more to do so.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    renderer = ChatRenderer(ChatTemplate(setup["source"], setup["tokens"]), setup["special_tokens"])
    write(answers, {})
    while (job := read(sys.stdin.buffer)) is not None:
        signal.alarm(setup["alarm_seconds"])
        answer = answer_to(renderer, job)
        signal.alarm(0)
        write(answers, answer)


def answer_to(renderer: ChatRenderer, job: dict[str, Any]) -> dict[str, Any]:
    try:
        rendered = renderer.render(ChatPrompt(**job))
    except RequestError as error:
        return {"refusal": error.message}
    return {"text": rendered.text, "sentinel": rendered.sentinel}


def read(stream: BinaryIO) -> Any:
    """The next frame; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return None if len(data) < length else decode(data)


def write(stream: BinaryIO, value: Any) -> None:
    stream.write(encode(value))
    stream.flush()


def encode(value: Any) -> bytes:
    """A frame. Lone surrogates, which JSON can carry, survive; raises RecursionError for what is too deep."""
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main()

from datetime import datetime

import pytest

from engine.chat_template import ChatTemplate
from engine.errors import ErrorKind, RequestError

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, messages=MESSAGES) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ '<&>é' | tojson }}", '"<&>é"'),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ bos_token }}{{ eos_token }}|{{ tools is none }}", "<s>|True"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
    ],
)
def test_template_language(source, expected):
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ messages[5].content }}", "refused the messages"),
        ("{{ 1 // 0 }}", "refused the messages"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages"),
        ("{{ range(999999999) | list }}", "refused the messages"),
    ],
)
def test_what_a_template_raises_is_the_requests_error(source, says):
    with pytest.raises(RequestError, match=says) as caught:
        render(source)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")

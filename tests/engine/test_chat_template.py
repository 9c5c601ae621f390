import tracemalloc
from datetime import datetime
from typing import Any

import pytest

from engine.chat_template import MAX_RENDERED_BYTES, ChatPrompt, ChatTemplate
from engine.errors import ErrorKind, RequestError

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, messages=MESSAGES, **more: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(ChatPrompt(messages, **more))


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


def test_tools_and_variables_reach_the_template():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [None, "<é>"]}}}]
    source = "{{ tools[0] | tojson }} {{ level }} {{ self_ is defined }} {{ 'on' if enable_thinking else 'off' }}"
    assert render(source, tools=tools, variables={"level": 2.5, "enable_thinking": False, "self": "x"}) == (
        '{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [null, "<é>"]}}} 2.5 False off'
    )
    assert render("{{ bos_token }}{{ messages | length }}", variables={"messages": "no", "bos_token": "x"}) == "x1"


def test_reasons_are_short():
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception(messages[0].content) }}", [{"content": "long " * 10000}])
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("size", [MAX_RENDERED_BYTES, MAX_RENDERED_BYTES + 1])
def test_the_result_is_bounded_in_bytes(size):
    unit = 2**20
    source = "{% for i in range(full) %}{{ messages[0].content }}{% endfor %}{% for i in range(rest) %}x{% endfor %}"
    messages = [{"content": "é" * (unit // 2)}]
    variables = {"full": size // unit, "rest": size % unit}
    if size <= MAX_RENDERED_BYTES:
        assert len(render(source, messages, variables=variables).encode()) == size
        return
    with pytest.raises(RequestError, match="more than 8388608 bytes"):
        render(source, messages, variables=variables)


def test_nothing_is_computed_while_compiling():
    tracemalloc.start()
    ChatTemplate("{{ 'a' * 10**8 }}{{ ('a' * 10**8) | length }}", {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7


CHATML = """{%- if tools %}
{{- '<|im_start|>system\n# Tools\n\n<tools>' }}
{%- for tool in tools %}
{{- '\n' }}{{- tool | tojson }}
{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
{%- endif %}"""
LLAMA3 = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set system = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system }}
{%- if tools is not none %}
{%- for t in tools %}
{{- t | tojson(indent=4) }}
{{- '\n\n' }}
{%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' or message.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- endif %}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}' }}
{%- else %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
LLAMA2 = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m['content'] }}[/INST]{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
CALL = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, {"é": None}]}}}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("source", "prompt", "expected"),
    [
        (CHATML, ChatPrompt(MESSAGES), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (
            CHATML,
            ChatPrompt(MESSAGES, variables={"enable_thinking": False}),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (
            CHATML,
            ChatPrompt(
                [{"role": "assistant", "content": None, "tool_calls": CALL}], [TOOL], add_generation_prompt=False
            ),
            '<|im_start|>system\n# Tools\n\n<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools>'
            '<|im_end|>\n<|im_start|>assistant\n\n<tool_call>\n{"name": "f", "arguments": {"x": [1, {"é": null}]}}\n'
            "</tool_call><|im_end|>\n",
        ),
        (
            LLAMA3,
            ChatPrompt(
                [
                    {"role": "system", "content": " Be brief. "},
                    *MESSAGES,
                    {"role": "assistant", "tool_calls": CALL},
                    {"role": "tool", "content": "4"},
                ],
                [{"a": 1}],
            ),
            '<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.{\n    "a": 1\n}\n\n<|eot_id|>'
            "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            '{"name": "f", "parameters": {"x": [1, {"é": null}]}}<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            LLAMA2,
            ChatPrompt([*MESSAGES, {"role": "assistant", "content": "yo"}, *MESSAGES]),
            "<s>[INST] hi [/INST] yo </s><s>[INST] hi [/INST]",
        ),
        (
            MISTRAL,
            ChatPrompt([*MESSAGES, {"role": "assistant", "content": "yo"}, *MESSAGES], [TOOL]),
            "<s>[INST]hi[/INST]yo</s>[AVAILABLE_TOOLS]"
            '[{"type": "function", "function": {"name": "f"}}][/AVAILABLE_TOOLS][INST]hi[/INST]',
        ),
    ],
)
def test_templates_in_the_manner_of_public_models(source, prompt, expected):
    assert ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(prompt) == expected


def test_a_template_says_what_it_wants():
    with pytest.raises(RequestError, match="refused the messages: roles must alternate"):
        render(LLAMA2, MESSAGES * 2)

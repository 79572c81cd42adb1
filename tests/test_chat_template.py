"""Chat templates: rendered as by transformers, and confined whatever they do."""

import datetime
import json
import time

import pytest
from conftest import byte_tokenizer

from dlm_rag.errors import CheckpointError
from dlm_rag.tokenizer import Tokenizer
from dlm_rag.tokenizer.chat_template import render_chat_template

CHATML = """{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}
{%- endif -%}
{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As Llama 3's: a date, tools, white space trimmed.
HEADERS = """{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if strftime_now is defined %}
    {%- set today = strftime_now('%d %b %Y') %}
{%- else %}
    {%- set today = '26 Jul 2024' %}
{%- endif %}
{%- if tools is not none %}
    {{- 'Environment: ipython\\n' }}
{%- endif %}
{{- today }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# As Mistral's: a namespace, roles that must alternate, a loop that is left.
INSTRUCT = """{{ bos_token }}{% set ns = namespace(index=0) %}{% for message in messages %}
{% if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}
{% endif %}{% if message['role'] == 'tool' %}{% break %}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}
{% set ns.index = ns.index + 1 %}{% endfor %}"""
OTHERS = """{{ messages | tojson(indent=2) }}{{ dict(a=1)['a'] }}
{% for m in messages %}
  {{ m.content }}
{% endfor %}"""
TEMPLATES = {"ChatML": CHATML, "headers": HEADERS, "instruct": INSTRUCT, "others": OTHERS}


def with_template(template):
    inner = byte_tokenizer()
    inner.chat_template = template
    return inner


@pytest.fixture
def on_the_day_of_templates(monkeypatch):
    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 26)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_renders_as_transformers_does(on_the_day_of_templates, name):
    inner = with_template(TEMPLATES[name])
    messages = [{"role": "user", "content": "  Who <wrote> “Emma”?\n"}]
    expected = inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    assert render_chat_template(TEMPLATES[name], json.dumps(values | inner.special_tokens_map)) == expected


@pytest.mark.parametrize("name", ["tiny-dream", "tiny-llada"])
def test_so_do_the_templates_of_the_golden_checkpoints(golden, name):
    tokenizer = Tokenizer.from_pretrained(golden / "checkpoints" / name)
    messages = [{"role": "user", "content": "Who?"}]
    inner = tokenizer.inner
    whole = inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    values = {"messages": messages, "add_generation_prompt": True, **inner.special_tokens_map}
    assert render_chat_template(inner.chat_template, json.dumps(values)) == whole


@pytest.mark.parametrize("name", ["ChatML", "headers", "instruct"])
def test_the_users_message_stands_between_prefix_and_suffix(name):
    inner = with_template(TEMPLATES[name])
    tokenizer = Tokenizer(inner, 256)
    prompt = tokenizer.build_prompt("Who?", ["Emma."])
    text = tokenizer.inner.decode(prompt.ids)
    suffixes = {"ChatML": "assistant\n", "headers": "<|end_header_id|>\n\n", "instruct": "[/INST]\n"}
    assert text.index("<|im_start|>user" if name == "ChatML" else "Who?") < text.index("Emma.")
    assert text.endswith(suffixes[name])


def test_every_day_is_the_same_day():
    text = render_chat_template("{{ strftime_now('%d %b %Y') }}", "{}")
    assert text == "26 Jul 2024"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no\nway') }}", "cannot be rendered: no"),
        ("{% if", "cannot be rendered: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered: access to attribute"),
        ("{{ messages | random }}", "cannot be rendered: No filter named 'random'"),
        ("{{ 'a' * 10**10 }}", "more than 512 MiB of memory"),
        ("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", "more than 100000 characters"),
        ("{{ (" + "(" * 5000 + ")" * 5001 + "}}", "cannot be rendered: "),
        ("no message at all", "does not show the user's message as it is"),
        ("{{ messages[0].content | upper }}", "as it is"),
        ("{{ messages[0].content | reverse }}", "as it is"),
        ("{{ messages[0].content | tojson }}", "as it is"),
        ("{{ messages[0].content | replace('\n', ' ') }}", "as it is"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "more than once"),
        ({"tool_use": CHATML}, "one called default"),
        (7, "is no text"),
        ([CHATML], "is no text"),
    ],
)
def test_a_template_that_will_not_do_is_refused(template, says):
    with pytest.raises(CheckpointError, match=says):
        Tokenizer(with_template(template), 256)


def test_of_several_templates_the_default_one_counts():
    several = Tokenizer(with_template({"default": CHATML, "tool_use": "{{ raise_exception('no') }}"}), 256)
    assert several.build_prompt("a", []) == Tokenizer(with_template(CHATML), 256).build_prompt("a", [])


def test_a_template_without_end_is_stopped():
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    start = time.perf_counter()
    with pytest.raises(ValueError, match="it takes more than"):
        render_chat_template(loops, "{}")
    assert time.perf_counter() - start < 60

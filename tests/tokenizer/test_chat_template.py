"""Chat templates: rendered as by transformers, and confined whatever they do."""

import datetime
import json
import resource

import pytest

from dlm_rag.errors import CheckpointError
from dlm_rag.tokenizer import Tokenizer, load_tokenizer, prompts
from dlm_rag.tokenizer.prompts import render_chat_affixes
from tests.support.tiny_models import byte_tokenizer

CHATML = """{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}
{%- endif -%}
{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As Mistral's: a namespace, roles that must alternate, a loop that is left.
INSTRUCT = """{{ bos_token }}{% set ns = namespace(index=0) %}{% for message in messages %}
{% if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}
{% endif %}{% if message['role'] == 'tool' %}{% break %}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}
{% set ns.index = ns.index + 1 %}{% endfor %}"""
TEMPLATES = {"ChatML": CHATML, "instruct": INSTRUCT}


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
def test_affixes_are_those_of_transformers_on_one_date(on_the_day_of_templates, name):
    inner = with_template(TEMPLATES[name])
    messages = [{"role": "user", "content": "Who <wrote> “Emma”?"}]
    whole = inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "Who <wrote> “Emma”?".join(render_chat_affixes(inner)) == whole


def test_qwen3_is_asked_for_no_thoughts():
    """As Tiny-A2D is published; a canvas holds an answer, and hardly thoughts before it."""
    inner = with_template(
        "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    assert render_chat_affixes(inner) == ("", "")
    assert render_chat_affixes(inner, enable_thinking=False) == ("", "<think></think>")


def test_every_day_is_the_same_day():
    inner = with_template("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}")
    assert render_chat_affixes(inner) == ("26 Jul 2024", "")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no\nway') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}",
        "no message at all",
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content }}{{ messages[0].content }}",
        [CHATML],
    ],
)
def test_unusable_templates_are_refused(template):
    with pytest.raises(CheckpointError, match="chat template"):
        Tokenizer(with_template(template), 256)


def test_the_default_of_several_templates_is_used():
    several = Tokenizer(with_template({"default": CHATML, "tool_use": "{{ raise_exception('no') }}"}), 256)
    assert several.build_prompt("a", []) == Tokenizer(with_template(CHATML), 256).build_prompt("a", [])


@pytest.mark.parametrize(
    "grown",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 'a'.ljust(10**10) }}",
        "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ 'a' * 10**7 }}",
    ],
)
def test_a_template_that_takes_memory_is_stopped(grown):
    with pytest.raises(CheckpointError, match="chat template"):
        render_chat_affixes(with_template(grown + "{{ messages[0].content }}"))
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_endless_template_is_stopped(monkeypatch):
    monkeypatch.setattr(prompts, "RENDER_SECONDS", 0.5)
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(CheckpointError, match="takes more than"):
        render_chat_affixes(with_template(loops))


@pytest.mark.parametrize(
    "place", ["chat_template.jinja", "chat_template.json", "a list", "names", "tokenizer_config.json"]
)
def test_a_template_is_found_in_every_file(tmp_path, place):
    inner = byte_tokenizer()
    if place == "tokenizer_config.json":
        inner.chat_template = CHATML
    inner.save_pretrained(tmp_path)
    if place == "chat_template.jinja":
        (tmp_path / place).write_text(CHATML)
    elif place != "tokenizer_config.json":
        others = {"a list": [{"name": "default", "template": CHATML}], "names": {"default": CHATML}}
        found = others.get(place, CHATML)
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": found}))
    assert load_tokenizer(tmp_path).chat_template == CHATML


def test_a_template_that_is_no_text_is_refused(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    named, several = {"rag": CHATML}, [{"name": "rag", "template": CHATML}, {"name": []}, 7]
    for found, says in ((3, 3), (named, "\\['rag'\\]"), (several, "\\['rag', '\\[\\]'\\]"), ([], "\\[\\]")):
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": found}))
        with pytest.raises(CheckpointError, match=f"json: chat_template is no text, .*: {says}$"):
            load_tokenizer(tmp_path)

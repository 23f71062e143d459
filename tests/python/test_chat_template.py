"""Chat templates: as transformers renders them, and no way out of the sandbox."""

import json
import tracemalloc
from pathlib import Path

import pytest
from tiny_models import byte_tokenizer

from lmdeploy.chat_template import (
    ChatTemplate,
    template_from_file,
    template_from_folder,
    template_from_gguf,
)
from lmdeploy.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.hub import resolve_model
from lmdeploy.tokenizer import Tokenizer
from lmdeploy.turbomind.gguf_file import GgufFile
from lmdeploy.turbomind.model_errors import ModelFormatError

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hi 你好"},
    {"role": "assistant", "content": " Hello! "},
    {"role": "user", "content": "Bye"},
]
LLAMA2_LIKE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}{{ '[INST] ' + system + message.content.strip() + ' [/INST]' }}
    {%- else %}{% generation %}{{ message.content | trim + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ' >' }}{% endif %}
"""
JSON_LIKE = (
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, origin="test", bos_token="<s>", eos_token="</s>")


def reference(source: str, *, add_generation_prompt: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [MESSAGES],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    return str(rendered[0])


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("source", [LLAMA2_LIKE, JSON_LIKE], ids=["llama2", "json"])
def test_renders_as_transformers(source: str, prompt: bool) -> None:
    got = template(source).render(MESSAGES, add_generation_prompt=prompt)
    assert got == reference(source, add_generation_prompt=prompt)


def test_smollm2_prompt() -> None:
    metadata = GgufFile(resolve_model("smollm2")).metadata
    own = template_from_gguf(metadata, tokenizer_from_gguf(metadata, "x"))
    assert own is not None
    assert own.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    for prompt in (True, False):
        assert own.render(MESSAGES, add_generation_prompt=prompt) == reference(
            own.source, add_generation_prompt=prompt
        )


def test_variables_reach_the_template() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
    assert template(source).render([]) == ""
    assert template(source).render([], variables={"enable_thinking": False}) == "quick"
    # They cannot replace what the engine passes.
    assert template("{{ bos_token }}").render([], variables={"bos_token": "x"}) == "<s>"


def test_the_templates_own_refusal_is_told() -> None:
    with pytest.raises(ValueError, match="roles must alternate"):
        template(LLAMA2_LIKE).render([MESSAGES[2]])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ 'x' | nofilter }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'other' %}",
        "{{ undefined_function() }}",
        "{% for i in range(90000) %}{{ ('x' * 10000) }}{% endfor %}",
    ],
)
def test_hostile_templates_are_value_errors(source: str) -> None:
    with pytest.raises(ValueError, match=r"template"):
        template(source).render(MESSAGES)


DOUBLED = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
SPINNING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BRANCHING = "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2 }}", "a number of more"),
        ("{{ 9 ** (messages|length * 100000000) }}", "a number of more"),
        ("{{ 'x' * 10**11 }}", "a text of more"),
        ("{{ 10**11 * 'x' }}", "a text of more"),
        ("{{ ([1] * 10**11)|length }}", "a list of more"),
        ("{{ 'x'|center(100000000000) }}", "a width of 100000000000"),
        ("{{ 'x'.rjust(100000000000) }}", "a width of 100000000000"),
        ("{{ [1]|batch(100000000000, 0)|list }}", "a width of 100000000000"),
        ("{{ '%0999999999d' % 1 }}", "wanted widths"),
        ("{{ '%*d' % (999999999, 1) }}", "wanted widths"),
        ("{{ '%0999999999d'|format(1) }}", "wanted widths"),
        ("{{ '{:999999999}'.format(1) }}", "wanted widths"),
        ("{{ '{:{}}'.format(1, 999999999) }}", "wanted widths"),
        ("{{ ('x' * 10**6)|replace('x', 'y' * 10**6) }}", "a text of more"),
        ("{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}", "a text of more"),
        ("{{ (['x' * 10**6] * 10**6)|join }}", "a text of more"),
        ("{{ ''.join(['x' * 10**6] * 10**6) }}", "a text of more"),
        ("{{ ['x' * 10**6] * 10**6 }}", "a text of more"),
        ("{{ (['x' * 10**6] * 10**6)|string|length }}", "a text of more"),
        (DOUBLED % ("'x'", "{% set ns.x = ns.x + ns.x %}"), "a text of more"),
        (DOUBLED % ("'x'", "{% set ns.x = ns.x ~ ns.x %}"), "a text of more"),
        (DOUBLED % ("'x'", "{% set y %}{{ ns.x ~ ns.x }}{% endset %}{% set ns.x = y %}"), "a text"),
        (DOUBLED % ("[1]", "{% set ns.x = ns.x + ns.x %}"), "a list of more"),
        (DOUBLED % ("[1]", "{% set ns.x = [ns.x, ns.x] %}"), "a list of more"),
        ("{{ lipsum() }}", "undefined"),
        (SPINNING, "runs for more than"),
        (BRANCHING, "runs for more than"),
    ],
)
def test_time_and_memory_are_bounded(
    source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmdeploy.template_sandbox.MAX_SECONDS", 2.0)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=words):
            template(source).render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 300_000_000
    finally:
        tracemalloc.stop()


def test_bounds_leave_ordinary_templates_alone() -> None:
    for source, text in {
        "{{ ['a', 'b']|join(', ') ~ 1 ~ [2] }}": "a, b1[2]",
        "{{ messages|map(attribute='role')|join('|') }}": "system|user|assistant|user",
        "{{ '%s is %05d' % ('x', 12) }} {{ '%d'|format(3) }} {{ '{} {y}'.format(1, y=2) }}": (
            "x is 00012 3 1 2"
        ),
        "{{ 'a\nb'|indent(2) }}|{{ 'a'|center(3) }}|{{ 'a'.ljust(3) }}|": "a\n  b| a |a  |",
        "{{ 2 ** 10 * 3 % 5 }} {{ 'ab' * 2 + 'c' }} {{ ([1] + [2]) * 2 }}": "2 ababc [1, 2, 1, 2]",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) ~ f('a') }}": "<1><a>",
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{% else %}none{% endfor %}": (
            "12"
        ),
        "{% set x %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ x }}": "012",
        "{% macro f(context, function) %}{{ context }}{{ function }}{% endmacro %}"
        "{{ f(context=1, function=2) }}": "12",
        "{{ '{\"id\": 12345678} at 12:20241123 %s' % 'x' }}": '{"id": 12345678} at 12:20241123 x',
        "{{ '{:%}'.format(1) }} {{ '{{{}}}'.format(7) }}": "100.000000% {7}",
        "{{ 'aXb'|replace('X', '-') }}{{ 'a,b'.split(',')[1] }}{{ 5|string }}": "a-bb5",
    }.items():
        assert template(source).render(MESSAGES) == text


@pytest.mark.parametrize("indent", [None, 4, 16])
def test_json_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch, indent: int | None) -> None:
    monkeypatch.setattr("lmdeploy.chat_template._MAX_OUTPUT_CHARS", 100_000)
    value: object = list(range(50_000))
    for _ in range(50):
        value = [value]
    source = template(f"{{{{ messages[0].value | tojson(indent={indent}) | length }}}}")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="passes 100000 characters"):
            source.render([{"value": value}])
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_json_is_indented_a_little() -> None:
    assert template("{{ [1] | tojson(indent=16) }}").render([]) == "[\n" + " " * 16 + "1\n]"
    assert template("{{ [1] | tojson(indent='\t') }}").render([]) == "[\n\t1\n]"
    for indent in ("17", "' ' * 17"):
        with pytest.raises(ValueError, match="indent=17, wanted at most 16"):
            template("{{ [1] | tojson(indent=" + indent + ") }}").render([])


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% endfor %}", "x" * (2 << 20)])
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(ModelFormatError, match="test:"):
        template(source)


def test_where_a_template_is_found(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), eos_ids=[2], bos_id=1)
    assert template_from_folder(tmp_path, tokenizer) is None
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    for name, content, wanted in (
        ("tokenizer_config.json", json.dumps({"chat_template": named}), "named"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ bos_token }}a"}), "<s>a"),
        ("chat_template.json", json.dumps({"chat_template": "b{{ eos_token }}"}), "b</s>"),
        ("chat_template.jinja", "c", "c"),
    ):
        (tmp_path / name).write_text(content)
        found = template_from_folder(tmp_path, tokenizer)
        assert found is not None and found.render([]) == wanted
    assert template_from_file(tmp_path / "chat_template.jinja", tokenizer).render([]) == "c"
    assert template_from_file(tmp_path / "chat_template.json", tokenizer).render([]) == "b</s>"
    with pytest.raises(ModelFormatError, match=r"gone\.jinja: cannot be read"):
        template_from_file(tmp_path / "gone.jinja", tokenizer)
    (tmp_path / "chat_template.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelFormatError, match="not a text"):
        template_from_file(tmp_path / "chat_template.json", tokenizer)

"""Tests of chat templates: transformers is the reference, and no template leaves the sandbox."""

import json
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from rendering import chat_template
from tiny_models import byte_tokenizer

from lmdeploy.base.checks import OptionError
from lmdeploy.base.errors import ModelFormatError, UnavailableError
from lmdeploy.chat.bounded import child, process
from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.chat.templates.jinja_template import (
    ChatTemplate,
    start_renderer,
    template_from_file,
    template_from_folder,
    template_from_gguf,
)
from lmdeploy.chat.templates.prompt_template import PromptTemplate
from lmdeploy.chat.tokenizer import Tokenizer
from lmdeploy.chat.tool_calls import JsonText
from lmdeploy.checkpoint.files.gguf_file import GgufFile
from lmdeploy.checkpoint.hub import resolve_model

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
    return chat_template(source, bos_token="<s>", eos_token="</s>")


def reference(source: str, *, add_generation_prompt: bool = True) -> str:
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
def test_render_equals_transformers(source: str, prompt: bool) -> None:
    got = template(source).render(MESSAGES, add_generation_prompt=prompt)
    assert got == reference(source, add_generation_prompt=prompt)


def test_render_smollm2_template_gives_expected_prompt() -> None:
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


def test_render_variables_reach_the_template() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
    assert template(source).render([]) == ""
    assert template(source).render([], variables={"enable_thinking": False}) == "quick"
    # Variables cannot replace values that the engine passes.
    assert template("{{ bos_token }}").render([], variables={"bos_token": "x"}) == "<s>"


def test_render_raise_exception_becomes_value_error() -> None:
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
def test_render_hostile_template_raises_value_error(source: str) -> None:
    with pytest.raises(ValueError, match=r"template"):
        template(source).render(MESSAGES)


DOUBLED = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
SPINNING = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FILTERED = "{% for a in range(99999) if (range(99999)|sum) < 0 %}{% endfor %}"
BRANCHING = "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}"
SEARCHED = "{% set x = range(99999)|list * 5 %}{{ range(99999)|TEST|list|length }}"
BLOCKS = (
    "{% set ns = namespace(n=0) %}{% block x %}{% if ns.n < 60 %}{% set ns.n = ns.n + 1 %}"
    "{{ self.x() }}{{ self.x() }}{% set ns.n = ns.n - 1 %}{% endif %}{% endblock %}"
)
SUMMED = "{{ ([[1] * 10**6] * 10**6)|sum(start=[]) }}"
DIVIDED = "{{ (('f' * 10**7)|int(0, 16)) // (('f' * 10**6)|int(0, 16)) }}"
# Straight-line code has no loop.
REPEATED = (
    "{% set x = range(99999)|list * 5 %}{% set y = range(99999)|list * 5 %}"
    "{% set t = 'x' * 10**7 %}" + "{{ EXPRESSION }}" * 400
)
DOTTED = "{% set p = '0.' * 10**5 ~ '0' %}{{ (['1'] * 99999)|USE|list|length }}"
BOMBS = [
    "{{ 9 ** (messages|length * 100000000) }}",
    "{{ 'x' * 10**11 }}",
    "{{ 10**11 * 'x' }}",
    "{{ ([1] * 10**11)|length }}",
    "{{ 'x'|center(100000000000) }}",
    "{{ 'x'.rjust(100000000000) }}",
    "{{ ([1] * 2**19)|map('center', 65536)|list }}",
    "{{ [1]|batch(100000000000, 0)|list }}",
    "{{ ('\n' * 10**6)|indent(65536, blank=true) }}",
    "{{ ('x' * 10**5)|wordwrap(1, true, 'y' * 10**5) }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%.*f' % (999999999, 1.0) }}",
    "{{ '%0999999999d'|format(1) }}",
    "{{ ('%065536d' * 10**4) % ((1,) * 10**4) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ ('{0:65536}' * 10**4).format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ '{0:{1[0]}}'.format(1, [999999999]) }}",
    "{{ '{a:{b}}'.format_map({'a': 1, 'b': 999999999}) }}",
    "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "{{ ('x' * 10**6)|replace('x', 'y' * 10**6) }}",
    "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "{{ (['x' * 10**6] * 10**6)|join }}",
    "{{ [1, 2]|join('x' * 10**8) }}",
    "{{ ('y' * 10**5).join(['x'] * 10**5) }}",
    "{{ ('x' * 10**6)|join('y' * 10**6) }}",
    "{{ 'y'.join('x' * 10**8) }}",
    "{{ range(99999)|map('string')|join('x' * 10**7) }}",
    "{{ ('x' * 10**7).join(range(99999)|map('string')) }}",
    "{{ range(99999)|map(attribute='a', default='x' * 10**7)|join }}",
    "{{ 5|round(-10**9) }}",
    "{{ 5|round(precision=10**9, method='ceil') }}",
    "{{ '%s' % (['x' * 10**6] * 10**6,) }}",
    "{{ namespace(x=['x' * 10**6] * 100) }}",
    "{{ ([{'a': 'x' * 10**6}] * 10**6)|join(attribute='a') }}",
    "{{ ('x'.encode() * 10**11)|length }}",
    "{{ (1).to_bytes(10**11, 'big')|length }}",
    "{{ ('x' * 10**6).translate({120: 'y' * 10**6})|length }}",
    "{{ ('\t' * 10**6).expandtabs(65536) }}",
    DOUBLED % ("'x'", "{% set ns.x = ns.x + ns.x %}"),
    DOUBLED % ("'x'", "{% set ns.x = ns.x ~ ns.x %}"),
    DOUBLED % ("'x'", "{% set y %}{{ ns.x ~ ns.x }}{% endset %}{% set ns.x = y %}"),
    DOUBLED % ("[1]", "{% set ns.x = ns.x + ns.x %}"),
    DOUBLED % ("[1]", "{% set ns.x = [ns.x, ns.x] %}"),
    DOUBLED % ("[1]", "{% set ns.x = (ns.x, ns.x) %}"),
    DOUBLED % ("[1]", "{% set ns.x = {1: ns.x, 2: ns.x} %}"),
    DOUBLED % ("[1]", "{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
    SUMMED,
    DIVIDED,
    SPINNING,
    FILTERED,
    BRANCHING,
    BLOCKS,
    *(
        REPEATED.replace("EXPRESSION", expression)
        for expression in ("-1 in x", "x == y", "x.count(-1)", "t.count('y')")
    ),
    *(
        DOTTED.replace("USE", use)
        for use in (
            "map(attribute=p, default=1)",
            "selectattr(p)",
            "rejectattr(p)",
            "unique(attribute=p)",
        )
    ),
    "{{ ('a' * 10**7).strip('b' * 10**7 ~ 'a') }}",
    "{{ ('a' * 10**7)|trim('b' * 10**7 ~ 'a') }}",
    "{{ ('a' * 10**7).rfind('ab' ~ 'a' * 10**6) }}",
    "{{ ('a' * 10**7).rsplit('ab' ~ 'a' * 10**6) }}",
    "{{ ('a' * 10**7).rpartition('ab' ~ 'a' * 10**6) }}",
    SEARCHED.replace("TEST", "select('in', x)"),
    SEARCHED.replace("TEST", "reject('in', x)"),
    SEARCHED.replace("TEST", "map('string')|select('in', x)"),
    SEARCHED.replace("TEST", "map('tojson')|reject('in', x)"),
]


@pytest.fixture
def strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[process.BoundedPool]:
    """Return a renderer with a limit of 0.4 s instead of 5."""
    text, limit = Path(child.__file__).read_text(), "MAX_SECONDS = 5.0"
    assert text.count(limit) == 1
    program = tmp_path / "child.py"
    program.write_text(text.replace(limit, "MAX_SECONDS = 0.4"))
    monkeypatch.setattr(child, "__file__", str(program))
    monkeypatch.setattr(child, "MAX_SECONDS", 0.4)
    renderer = start_renderer()
    yield renderer
    renderer.close()


@pytest.mark.parametrize("source", BOMBS, ids=lambda source: source[-60:])
def test_expensive_template_is_stopped_by_a_limit(source: str, strict: process.BoundedPool) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"it takes more than 0\.4 s or too much memory"):
        ChatTemplate(source, origin="test", renderer=strict).render(MESSAGES)
    assert time.monotonic() - begin < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10
    # A process that has ended is started again.
    assert ChatTemplate("a", origin="test", renderer=strict).render(MESSAGES) == "a"


def test_prompt_has_a_largest_size() -> None:
    with pytest.raises(OptionError, match="more than 67108864 characters"):
        template("{{ 'x' * (2**26 + 1) }}").render(MESSAGES)
    assert len(template("{{ 'x' * 2**26 }}").render(MESSAGES)) == 1 << 26


def test_slow_conversations_delay_others_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_FAIR_SECONDS", 0.2)
    found = template(
        "{% for m in messages %}{{ m.content }}{% if m.content == 'slow' %}"
        + SPINNING
        + "{% endif %}{% endfor %}"
    )

    def outcome(_: int) -> type[BaseException] | None:
        try:
            found.render([{"role": "user", "content": "slow"}])
        except (OptionError, UnavailableError) as error:
            return type(error)
        return None

    with ThreadPoolExecutor(4) as threads:
        slow = [threads.submit(outcome, i) for i in range(4)]
        waits = []
        while not all(each.done() for each in slow):
            begin = time.monotonic()
            assert found.render(MESSAGES).endswith("Bye")
            waits.append(time.monotonic() - begin)
        assert max(waits) < 3
        assert {each.result() for each in slow} <= {OptionError, UnavailableError}


def test_values_that_json_lacks_are_rejected() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), {1, 2}, loop, b"x"):
        with pytest.raises(OptionError, match="cannot be given to the chat template"):
            template("").render([], variables={"value": value})
    values = {"value": [1, 2.5, None, True, {"a": "\ud800 é\0"}]}
    assert template("{{ value[4].a ~ value[:4] }}").render([], variables=values) == (
        "\ud800 é\0[1, 2.5, None, True]"
    )


def test_json_text_is_also_an_object() -> None:
    source = "{{ x|tojson }} {{ x }} {{ '-' + x }} {{ x.a }} {{ x is mapping }} "
    source += "{{ x|tojson(sort_keys=true) }}"
    text = ' {"a":  1} '

    def rendered(text: str, *, is_parsed: bool) -> str:
        variables = {"x": JsonText(text, is_parsed=is_parsed)}
        return template(source).render([], variables=variables)

    assert rendered(text, is_parsed=True) == '{"a":  1} {"a":  1} -{"a":  1} 1 True {"a": 1}'
    assert rendered(text, is_parsed=False) == f"{text} {text} -{text}  False {text}"
    for other in ("[1]", "{", "[" * 100_000):
        assert rendered(other, is_parsed=True).startswith(f'"{other}" {other} -{other}  False')


# These templates use the features that chat templates of released models use.
TOOLS = """{%- if custom is defined %}{%- set tools = custom %}{%- endif %}
{%- macro show(tool, context=none) -%}
{{- '- ' ~ tool.function.name ~ ': ' ~ (tool.function.description or 'none') }}
{%- for key, value in tool.function.parameters.properties.items() %}
    {{- '\n  ' + key + ' (' + value.type|string + ')' }}
{%- endfor %}
{%- endmacro %}
{%- set ns = namespace(system='', last=-1, seen=[]) %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0]['content']|trim %}
    {%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}<|system|>{{ ns.system }}
{%- if tools is not none and tools|length > 0 %}
{%- for tool in tools %}
{{ show(tool, context=1) }} {{ tool | tojson(indent=2) }}
{%- endfor %}{%- endif %}
{%- for message in rest[::-1] %}
    {%- set index = (rest|length - 1) - loop.index0 %}
    {%- if message.role == 'user' and ns.last < 0 %}{%- set ns.last = index %}{%- endif %}
    {%- set ns.seen = ns.seen + [message.role] %}
{%- endfor %}
{%- for message in rest if message.role != 'tool' %}
{{- '<|' + message.role + '|>' }}
{%- if message.content is string and '</think>' in message.content %}
    {%- set thought = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
    {{- message.content.split('</think>')|last|trim ~ ' (' ~ thought.lstrip() ~ ')' }}
{%- else %}{{- message.content if message.content is string else message.content|join(', ') }}
{%- endif %}
{%- if loop.last and not loop.first %}{{ '!' * 3 }}{%- endif %}
{%- if message.content.startswith('H') and message.content[-1:] not in ['x', 'y'] %}#{% endif %}
{%- endfor %}
{{- '%s of %d, %.2f%%' % ('last', ns.last, 12.5) }} {{ ns.seen|unique|sort|join('|') }}
{{- '{} {name!r:>8} {{}}'.format(1, name='n') }} {{ rest|map(attribute='role')|list }}
{{- rest|selectattr('role', 'equalto', 'user')|map(attribute='content')|map('upper')|list }}
{{- messages|groupby('role')|length }} {{ 7 // 2 * 3 % 5 - 1 }}
{{ 2 ** 10 / 4 }} {{ {'a': (1, 2)} }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}{% generation %}{% endgeneration %}"""
ROLES = """{% set names = {'user': 'U', 'assistant': 'A', 'system': 'S'} %}
{% for m in messages %}{{ names[m.role] }}{{ loop.cycle('-', '=') }}
{{ m['content']|replace(' ', '_') }}
{% if not loop.last %}{{ loop.nextitem.role|capitalize }}{% endif %}{% else %}none{% endfor %}
{% set text %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}
{{ text }}{{ text|indent(2, true) }}
{% macro wrap(function, context) %}<{{ caller() }}{{ function }}{{ context }}>{% endmacro %}
{% call wrap(function=1, context=2) %}x{% endcall %}{{ 100000|center(8) }}{{ 'a\nb'|indent('  ') }}
{{ '* total: %d' % 100000 }} {{ '{{"id": 12345678}} {}'.format(1) }} {{ '%% 20241123 %s' % 'x' }}
{{ '{"id": 12345678} at 12:20241123 %s' % 'x' }} {{ '%05d|%-6s|' % (12, 'x') }}{{ '%d'|format(3) }}
{{ '12'|int + 'ff'|int(0, 16) }} {{ [1, 2, 3]|sum }} {{ 'a,b'.split(',')[1] }} {{ 'x'.zfill(3) }}"""


@pytest.mark.parametrize("source", [TOOLS, ROLES])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_render_ordinary_template_equals_plain_jinja(
    source: str, add_generation_prompt: bool
) -> None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    ours = template(source)
    environment.filters["tojson"] = child._to_json
    parameters = {"properties": {"city": {"type": "string"}, "days": {"type": ["integer"]}}}
    tool = {"function": {"name": "weather", "description": None, "parameters": parameters}}
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}]
    variables = {"tools": [tool], "documents": None}
    plain = environment.from_string(child._without_generation_marks(source)).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
        **variables,
    )
    rendered = ours.render(
        messages, add_generation_prompt=add_generation_prompt, variables=variables
    )
    assert rendered == plain and len(plain) > 200


def test_render_limits_do_not_affect_ordinary_templates() -> None:
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
        "{{ messages|join('+', attribute='role') ~ '-'.join(['a', 'b']) ~ 2.55|round(1) }}": (
            "system+user+assistant+usera-b2.5"
        ),
        "{{ 'aXb'|replace('X', '-') }}{{ 'a,b'.split(',')[1] }}{{ 5|string }}": "a-bb5",
    }.items():
        assert template(source).render(MESSAGES) == text


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% endfor %}", "x" * (2 << 20)])
def test_chat_template_invalid_source_raises_model_format_error(source: str) -> None:
    with pytest.raises(ModelFormatError, match="test:"):
        template(source)


SYSTEM_FIRST = """\
{%- for m in messages %}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("late") }}{% endif %}
{{- m.role }}: {{ m.content }};
{%- endfor %}"""
SYSTEM_ONCE = """\
{%- if messages[0].role == "system" %}S {{ messages[0].content }};{% endif %}
{%- for m in messages if m.role != "system" %}{{ m.role }}: {{ m.content }};{% endfor %}"""
NO_SYSTEM = """\
{%- for m in messages %}
{%- if m.role == "system" %}{{ raise_exception("no") }}{% endif %}{{ m.role }}: {{ m.content }};
{%- endfor %}"""
IN_PARTS = (
    "{% for m in messages %}{{ m.role | upper }}: {% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};{% endfor %}"
)
USER_IN_PARTS = """\
{%- for m in messages %}
{%- if m.role == "user" %}{{ m.content[0].text }}{% else %}{{ m.content | trim }}{% endif %};
{%- endfor %}"""
LATE = [("system", "A"), ("user", "B"), ("system", "C"), ("user", "D"), ("assistant", "E")]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (SYSTEM_FIRST, "system: A\n\nC;user: B;user: D;assistant: E;"),
        (SYSTEM_ONCE, "S A\n\nC;user: B;user: D;assistant: E;"),
        (NO_SYSTEM, "user: A\n\nC\n\nB;user: D;assistant: E;"),
        (IN_PARTS, "SYSTEM: A;USER: B;SYSTEM: C;USER: D;ASSISTANT: E;"),
        (USER_IN_PARTS, "A;B;C;D;E;"),
        (SYSTEM_FIRST.replace("late", "{{"), "system: A\n\nC;user: B;user: D;assistant: E;"),
    ],
    ids=["first", "once", "never", "parts", "parts of the user", "odd message"],
)
def test_render_shows_every_text_in_the_form_that_the_template_reads(
    source: str, wanted: str
) -> None:
    messages = [{"role": role, "content": text} for role, text in LATE]
    assert template(source).render(messages) == wanted


def test_render_keeps_messages_where_the_template_shows_them() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    messages = [{"role": role, "content": text} for role, text in LATE]
    assert template(source).render(messages) == (
        "system: A;user: B;system: C;user: D;assistant: E;"
    )
    # Without a late message, the first one stays as it is.
    assert template(SYSTEM_FIRST).render(messages[:2]) == "system: A;user: B;"
    assert template(SYSTEM_FIRST).render(messages[1:3]) == "system: C;user: B;"
    assert template(NO_SYSTEM).render(messages[:1]) == "user: A;"


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("ljust(4)", "ab  "),
        ("center(4)", " ab "),
        ("zfill(4)", "00ab"),
        ("replace('b', 'c')", "ac"),
        ("strip('a')", "b"),
        ("rfind('b')", "1"),
        ("format(1)", "ab"),
    ],
)
def test_methods_with_limits_work_in_loops_and_blocks(call: str, wanted: str) -> None:
    messages = [{"role": "user", "content": "ab"}]
    loop = "{% for m in messages %}{{ m.content." + call + " }}{% endfor %}"
    assert template(loop).render(messages) == wanted
    block = "{% block one %}{% set x = 1 %}{{ messages[0].content." + call + " }}{% endblock %}"
    assert template(block).render(messages) == wanted


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("{% generation %}", "{% endgeneration %}"),
        ("{%- generation -%}", "{%- endgeneration -%}"),
        ("{% generation -%}", "{%- endgeneration %}"),
        ("{%- generation %}", "{% endgeneration -%}"),
        ("\n  {%- generation %}\n", "\n  {% endgeneration %}\n"),
    ],
)
def test_generation_marks_strip_spaces_as_in_transformers(begin: str, end: str) -> None:
    source = f"a {begin} {{{{ messages[0].content }}}} {end} b"
    assert template(source).render(MESSAGES) == reference(source)


def test_template_from_folder_finds_template_in_order_of_precedence(tmp_path: Path) -> None:
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
    with pytest.raises(ModelFormatError, match=r"gone\.jinja: The file cannot be read"):
        template_from_file(tmp_path / "gone.jinja", tokenizer)
    (tmp_path / "chat_template.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelFormatError, match="must be a string"):
        template_from_file(tmp_path / "chat_template.json", tokenizer)


TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


def named_list(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))


def named_files(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")


@pytest.mark.parametrize("write", [named_list, named_files])
def test_requests_with_tools_use_the_template_for_tools(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    found = template_from_folder(tmp_path, Tokenizer(byte_tokenizer(), eos_ids=[2], bos_id=1))
    assert found is not None
    assert found.render([]) == found.render([], variables={"tools": []}) == "plain"
    assert found.render([], variables=TOOLS) == "tools"
    assert PromptTemplate(found).source == "plaintools"  # both tell the format of tool calls


def test_gguf_files_have_a_template_for_tools() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), eos_ids=[2], bos_id=1)
    key = "tokenizer.chat_template"
    metadata = {key: "plain", f"{key}.tool_use": "tools", f"{key}s": ["tool_use"]}
    found = template_from_gguf(metadata, tokenizer)
    assert found is not None
    assert (found.render([]), found.render([], variables=TOOLS)) == ("plain", "tools")


def test_the_only_named_template_is_used_for_every_request(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = template_from_folder(tmp_path, Tokenizer(byte_tokenizer(), eos_ids=[2], bos_id=1))
    assert found is not None and found.render([]) == "tools"

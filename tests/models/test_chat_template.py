"""Chat templates of strangers: they read no files, run no code, and end soon with little memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from jaxspec.models.load import chat_template
from jaxspec.models.load.chat_template import ChatTemplate

TALK = [{"role": "user", "content": "x" * 1000}]
#: Each would take hours, or gigabytes.
ENDLESS = [
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ (5).to_bytes(10**10, 'big') }}",
    "{{ 9 ** (10**9) }}",
    "{{ 1 | round(10**9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "{% set n = namespace(a='aaaa') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "{% set n = namespace(a='aaaa') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{% set n = namespace(a=[], b='a' * 10**7) %}"
    "{% for i in range(99999) %}{% set n.a = n.a + [n.b[1:]] %}{% endfor %}",
    "{% set x %}aaaaaaaa{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "{{ '%10000000000d' % 1 }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**10) }}",
    "{{ messages[0].content | replace('x', 'y' * 10**6) }}",
    "{{ messages[0].content.replace('x', 'y' * 10**6) }}",
    "{{ ('y' * 10**7).join('x' * 10**7) }}",
    "{{ ('x' * 10**7) | join('y' * 10**7) }}",
    "{{ 'a'.translate({97: 'b' * 10**6}) }}",
    "{{ ('\\n' * 10**5) | indent(10**5) }}",
    "{{ ('\\t' * 10**5).expandtabs(10**5) }}",
    "{{ (range(99999) | list) | map('center', 99999) | list | length }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ lipsum(10**9) }}",
    # What is short because its parts are shared.
    "{{ (['x' * 10**6] * 10**3) | join('') | length }}",
    "{{ ''.join(['x' * 10**6] * 10**3) | length }}",
    "{{ (('%(a)s' * 10**3) % {'a': 'x' * 10**6}) | length }}",
    "{{ ('%(a)99999999s' % {'a': 1}) | length }}",
    "{{ ('{0}' * 10**3).format('x' * 10**6) | length }}",
    "{{ ([['x' * 10**4] * 10**3] * 10**3) | tojson | length }}",
    "{{ ([['x' * 10**4] * 10**3] * 10**3) | string | length }}",
    "{{ [['x' * 10**4] * 10**3] * 10**3 }}",
    "{{ ('a' * 10**4) | replace(new='x' * 10**6, old='a') | length }}",
    "{{ ('a' | safe).ljust(10**9) | length }}",
    "{{ ([[0] * 10**4] * 10**4) | sum(start=[]) | length }}",
    "{% set n = namespace(a=[0], b=[0]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
    "{% endfor %}{{ n.a == n.b }}",
    "{% set n = namespace(a=[0]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that is used up in a moment."""
    monkeypatch.setattr(chat_template, "BUDGET", 2**24)


@pytest.mark.parametrize("source", ENDLESS)
def test_work_and_memory_are_bounded(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="chat template"):
            ChatTemplate(source).render(TALK)
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", -1.0)
    with pytest.raises(ValueError, match="too much work"):
        ChatTemplate("{% for m in messages %}{% endfor %}").render(TALK)


def test_what_a_client_nests_deeply_is_not_indented_without_end() -> None:
    inner: Any = [1] * 100_000
    for _ in range(100):
        inner = [inner]
    with pytest.raises(ValueError, match="too much work"):
        ChatTemplate("{{ tools | tojson(indent=4) }}").render(TALK, tools=inner)


@pytest.mark.parametrize(
    "source",
    ["{% include '/etc/passwd' %}", "{% extends '/etc/passwd' %}", "{% import 'os' as os %}",
    "{{ ''.__class__.__mro__[1] }}",
     "{{ cycler.__init__.__globals__ }}{{ 1 // 0 }}", "{{ '{0.__class__.__mro__}'.format(1) }}"],
)  # fmt: skip
def test_nothing_is_read_or_run(source: str) -> None:
    with pytest.raises(ValueError, match="can't render"):
        ChatTemplate(source).render(TALK)


@pytest.mark.parametrize(
    "source",
    ["{{ " + "[" * 2000 + "]" * 2000 + " }}", "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{{ '" + "a" * 300_000],
)
def test_large_templates_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.index }}{% endfor %}",
        "TrueTrue11"),
        ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% else %}none{% endfor %}", "a=1"),
        ("{{ nothing }}{% for a in nothing %}x{% else %}none{% endfor %}", "none"),
        ("{{ 'abc'[::-1] ~ 1 ~ none }}|{{ 'a b'.split(' ')[1] }}|{{ ['a', 2] | join(', ') }}", "cba1None|b|a, 2"),
        ("{{ '%s is %d' % ('a', 3) }} {{ '{} {x}'.format(1, x=2) }} {{ '%s' | format('a') }}", "a is 3 1 2 a"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
         "{{ messages | map(attribute='role') | join }}",
         "1user"),
        ("{{ {'b': [1, 'é']} | tojson }}{{ {'a': 1} | tojson(indent=1) }}", '{"b": [1, "é"]}{\n "a": 1\n}'),
        ("{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}", "1"),
        ("{{ nothing | default(20000000) }}{{ 'é' == 'é' }}{{ [1, [2]] == [1, [2]] }}{{ 1 < 2 < 3 }}{{ 1 in [1] }}",
        "20000000TrueTrueTrueTrue"),
        ("{{ 2 ** 10 }}{{ 7 % 4 }}{{ 'a' * 3 }}{{ [1] + [2] }}{{ 1.5 + 1 }}", "10243aaa[1, 2]2.5"),
        ("{{ 'a\nb' | indent(2) }}{{ 'x' | default('y') }}{{ ' a ' | trim }}{{ 'aXa' | replace('X', '-') }}",
        "a\n  bxaa-a"),
    ],
)  # fmt: skip
def test_usual_templates_render_as_before(source: str, rendered: str) -> None:
    assert ChatTemplate(source).render(TALK) == rendered


def test_a_long_talk_may_be_collected_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "BUDGET", 2**27)
    template = ChatTemplate(
        "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t + m.role + ': ' + m.content + '\n' %}"
        "{% endfor %}{{ n.t }}"
    )
    talk = [{"role": "user", "content": "x" * 2000}] * 500
    assert template.render(talk) == "".join(f"{m['role']}: {m['content']}\n" for m in talk)

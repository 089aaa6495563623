"""Chat templates are programs of others: they are rendered within limits of time, memory and length."""

import multiprocessing
import sys
import threading
import time

import pytest
from tiny_tokenizers import TURNS, characters

from lockstep.data import template_limits
from lockstep.data.template_limits import TemplateLimitReached, render_chat

CONVERSATION = [{"role": "user", "content": "hi"}]
LOOP = 3 * "{% for a in range(99999) %}" + 3 * "{% endfor %}"
LATE = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}" + TURNS
DOUBLING = "{% set n = namespace(x='a') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
RECURSION = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 1.0)
    monkeypatch.setattr(template_limits, "_WATCH_EVERY_S", 0.1)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (LOOP, "CPU time"),
        ("{{ 'a' * 10**10 }}", "memory"),
        (DOUBLING, "memory|CPU time"),  # whichever comes first on a busy machine
        ("{{ 'a'.ljust(9999999999) }}", "memory"),
        ("{{ '%9999999999d' % 1 }}", "memory"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "a text of more than 8,388,608 characters"),
        (RECURSION, "calls itself without end"),
    ],
    ids=["loop", "product", "doubling", "width", "format", "length", "recursion"],
)
def test_a_template_without_bounds_is_stopped_before_it_takes_anything(template: str, words: str) -> None:
    tokenizer = characters(template)
    tokenizer.name_or_path = "some/model"
    before, began = template_limits._memory_bytes(template_limits._RESIDENT), time.thread_time()
    with pytest.raises(TemplateLimitReached, match=words) as caught:
        render_chat(tokenizer, CONVERSATION)
    assert "some/model" in str(caught.value) and "Set model.chat_template" in str(caught.value)
    assert template_limits._memory_bytes(template_limits._RESIDENT) - before < 100 << 20
    assert time.thread_time() - began < 1.0, "another process did the work"


def test_a_template_that_loops_later_is_stopped_in_any_thread() -> None:
    tokenizer, found = characters(LATE), []
    assert render_chat(tokenizer, CONVERSATION, add_generation_prompt=True) == "<|user|>hi<eos>\n<|assistant|>"

    def render() -> None:
        with pytest.raises(TemplateLimitReached, match="CPU time"):
            render_chat(tokenizer, [{"role": "user", "content": "loop"}])
        found.append(render_chat(tokenizer, CONVERSATION))

    thread = threading.Thread(target=render)
    thread.start()
    for _ in range(200):
        assert render_chat(tokenizer, CONVERSATION) == "<|user|>hi<eos>\n", "other threads are not disturbed"
        time.sleep(0.005)
    thread.join(30)
    assert found == ["<|user|>hi<eos>\n"], "the thread goes its way afterwards"


def test_a_template_that_grows_later_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 60.0)
    monkeypatch.setattr(template_limits, "MAX_GROWTH_BYTES", 64 << 20)
    grow = (
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + ['a' * (9999 + i)] %}{% endfor %}"
    )
    tokenizer = characters("{% if messages[0].content == 'grow' %}" + grow + "{% endif %}" + TURNS)
    render_chat(tokenizer, CONVERSATION)
    with pytest.raises(TemplateLimitReached, match="memory"):
        render_chat(tokenizer, [{"role": "user", "content": "grow"}])


def test_an_ordinary_error_of_a_template_is_its_own() -> None:
    with pytest.raises(Exception, match="user first"):
        render_chat(characters("{{ raise_exception('user first') }}"), CONVERSATION)


def test_many_threads_render_beside_each_other() -> None:
    tokenizer = characters(TURNS)
    wrong: list[str] = []

    def render(name: str) -> None:
        for _ in range(300):
            text = render_chat(tokenizer, [{"role": "user", "content": name}])
            if text != f"<|user|>{name}<eos>\n":
                wrong.append(text)

    threads = [threading.Thread(target=render, args=(str(n),)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert wrong == [] and not any(each.is_alive() for each in threads)


def _trace_after_rendering(words: str) -> None:
    """Calls a function under a profiler after a conversation was rendered or stopped."""
    template_limits.MAX_CPU_S, template_limits._WATCH_EVERY_S = 1.0, 0.1  # type: ignore[misc]
    tokenizer = characters(LATE)
    render_chat(tokenizer, CONVERSATION)
    try:
        render_chat(tokenizer, [{"role": "user", "content": words}])
    except TemplateLimitReached:
        assert words == "loop"
    sys.setprofile(lambda frame, event, argument: None)
    characters(TURNS)
    sys.setprofile(None)


@pytest.mark.parametrize("words", ["hi", "loop"])
def test_a_debugger_or_profiler_can_follow_afterwards(words: str) -> None:
    """An asynchronous exception that was taken back left CPython's flag set: the next traced call never began."""
    child = multiprocessing.get_context("fork").Process(target=_trace_after_rendering, args=(words,))
    child.start()
    child.join(60)
    hung = child.exitcode is None
    child.kill()
    child.join(10)
    assert not hung and child.exitcode == 0

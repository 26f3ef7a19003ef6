"""Chat templates that were made to harm: each is one line for the client, and the server goes on."""

import threading
from contextlib import closing

import pytest
from transformers import AutoTokenizer

from knnstore.server import chat_templates
from knnstore.server.chat_templates import ChatTemplate
from knnstore.server.errors import ApiError
from tests.server.conftest import Listening
from tests.server.test_clients import make_home

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "The council"}]
SOUND = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ bos_token }}"

ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
HARMFUL = {
    "loops": (ENDLESS, 500, "took more than"),
    "holds the lock of Python": ("{{ 10 ** (10 ** 9) }}", 500, "took more than"),
    "takes long to parse": ("{{ (" + "1+" * 2_000_000 + "1) }}", 500, "took more than"),
    "asks for memory": ("{{ 'a' * 10 ** 11 }}", 400, "too much memory"),
    "doubles": ("{% set n = namespace(t='a') %}" + "{% set n.t = n.t + n.t %}" * 60, 400, "too much memory"),
    "a wide range": ("{% for i in range(10 ** 9) %}a{% endfor %}", 400, "[Rr]ange"),
    "a long text": ("{% for i in range(90000) %}abcdefgh{% endfor %}", 400, "720,000 characters"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", 400, "recurses too deeply"),
    "parentheses": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", 400, "recurses too deeply"),
    "a class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 400, "unsafe|no attribute|undefined"),
    "globals": ("{{ raise_exception.__globals__['os'].system('true') }}", 400, "unsafe|undefined"),
    "a format": ("{{ '{0.__class__.__mro__}'.format(1) }}", 400, "unsafe"),
    "globals of a function": ("{{ cycler.__init__.__globals__.os.popen('id') }}", 400, "unsafe|undefined"),
    "an undefined variable": ("{{ missing.value }}", 400, "'missing' is undefined"),
    "an exception": ("{{ raise_exception('no\n' * 9999) }}", 400, ": no$"),
    "a file": ("{% include '/etc/passwd' %}", 400, "no loader"),
    "a syntax error": ("{% for %}", 400, "template"),
    "a surrogate": ("{{ '\\ud800' }}", None, ""),
}  # fmt: skip


@pytest.fixture
def tokenizer(model_path):
    return AutoTokenizer.from_pretrained(model_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_template_is_one_line(tokenizer, monkeypatch, name) -> None:
    tokenizer.chat_template, status, reason = HARMFUL[name]
    if status == 500:  # the others need not take the time
        monkeypatch.setattr(chat_templates, "_CPU_SECONDS", 1)
    template = ChatTemplate(tokenizer, 10_000)
    hung: list[str] = []
    guard = threading.Timer(240, lambda: (hung.append(name), template._process.kill()))
    guard.start()
    try:
        for _ in range(2):  # the second call starts another process where the first one has ended
            if status is None:
                assert template.render(MESSAGES) == "\ud800"
                continue
            with pytest.raises(ApiError, match=reason) as refused:
                template.render(MESSAGES)
            assert refused.value.status == status
            assert len(str(refused.value).splitlines()) == 1
            assert len(str(refused.value)) < 500
    finally:
        guard.cancel()
        template.close()
    assert not hung


@pytest.mark.slow
def test_a_template_sees_messages_and_special_tokens(tokenizer) -> None:
    tokenizer.chat_template = SOUND
    template = ChatTemplate(tokenizer, 100)
    try:
        assert template.render(MESSAGES) == "The council<|end|>"
        assert template.render([{"role": "user", "content": "Déjà\n{{ 1 }}"}]) == "Déjà\n{{ 1 }}<|end|>"
    finally:
        template.close()


@pytest.fixture
def endless(tmp_path, monkeypatch):
    """A server over a store whose model has an endless template, which is ended after a second."""
    monkeypatch.setattr(chat_templates, "_CPU_SECONDS", 1)
    with closing(Listening(make_home(tmp_path, ENDLESS), require_keys=False)) as server:
        yield server


@pytest.mark.slow
def test_an_endless_template_delays_no_other_request(endless) -> None:
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    answers: list = []
    asking = [
        threading.Thread(target=lambda: answers.append(endless.call("POST", CHAT, json=chat)))
        for _ in range(6)  # more than there are threads that read requests
    ]
    for thread in asking:
        thread.start()
    text = {"model": "tiny", "prompt": "The council", "max_tokens": 1}
    assert endless.call("POST", "/v1/completions", json=text).status_code == 200
    assert endless.call("POST", "/tokenize", json={"prompt": "The council"}).status_code == 200
    assert len(answers) < len(asking)  # those were answered before
    for thread in asking:
        thread.join()
    assert {answer.status_code for answer in answers} == {500}
    assert {answer.json()["error"]["code"] for answer in answers} == {"chat_template_failed"}

"""Conversations, with a model that has a template for them."""

import shutil

import openai
import pytest
import torch
from transformers import AutoTokenizer

import knnstore
from knnstore import Selection
from knnstore.lm import settings_for

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{{ message['role'][0] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
PARTS = ("The ", "council")
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": part} for part in PARTS]}]


@pytest.fixture(scope="module")
def talking(listen, tmp_path_factory, model_path):
    """A server over a store for a model with a template, and the store's home."""
    tmp_path = tmp_path_factory.mktemp("chat")
    folder = shutil.copytree(model_path, tmp_path / "models" / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    lm = knnstore.create(tmp_path / "talking", str(folder))
    with lm.store:
        lm.add(["u: The council\na: said that the harbour wall was lost."], domain="talks")
    return listen(tmp_path / "talking", require_keys=False), tmp_path / "talking"


@pytest.mark.slow
def test_a_conversation_goes_on_as_the_template_has_it(talking):
    server, home = talking
    asked = {"model": "tiny+talks", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
    client = server.client()
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    lm = knnstore.load(home)
    lm.knn = settings_for(lm.store, Selection(domains=("talks",)))
    with lm.store, torch.inference_mode():
        tokens = lm.reader.tokenize("u: The council\na:").tolist()
        inputs = torch.tensor([tokens])
        written = lm.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        expected = lm.reader.decode(written[0, len(tokens) :].tolist())
        log_probs = lm(written).logits[0, len(tokens) - 1 : -1].log_softmax(-1)
    choice = whole.choices[0]
    assert (whole.object, choice.message.role, choice.message.content) == (
        "chat.completion", "assistant", expected,
    )  # fmt: skip
    assert whole.usage.prompt_tokens == len(tokens)
    gold = log_probs.gather(1, written[0, len(tokens) :, None])[:, 0].tolist()
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(gold, abs=1e-5)
    assert all(len(one.top_logprobs) >= 2 for one in choice.logprobs.content)
    events = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(one.delta.content or "" for event in events for one in event.choices) == expected
    assert [one.finish_reason for event in events for one in event.choices if one.finish_reason] == ["length"]
    assert (events[-1].choices, events[-1].usage) == ([], whole.usage)


@pytest.mark.slow
def test_what_the_template_refuses_is_refused(talking):
    client = talking[0].client()
    system = {"role": "system", "content": "Be brief."}
    assert client.chat.completions.create(model="tiny", messages=[system, *MESSAGES], max_tokens=1).choices
    for wrong in (
        [*MESSAGES, system],
        [],
        [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": 1}],
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=wrong, max_tokens=1)

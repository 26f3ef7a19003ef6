"""Translations of an encoder-decoder model: the source is the prompt, and documents are pairs."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import knnstore
from knnstore.catalog import Right
from knnstore.lm import CacheSettings, FixedLambda, KNNSettings, NGramSettings
from knnstore.server.engine import Engine, Prompt, Sampling, Task
from knnstore.server.engine.pairs import make_generation_rules
from knnstore.store import Selection
from tests.cli.conftest import call
from tests.lm.seq2seq import EOS, make_model, make_pairs, make_tokenizer
from tests.server.conftest import Server
from tests.server.test_engine import Listener

PAIRS, HELD_OUT = make_pairs(40), make_pairs(6, 1)
SOURCES = [pair["source"] for pair in HELD_OUT]
MIXED = {"k": 8, "probes": 0, "temperature": 8.0, "lam": 0.4}
SURE = {"k": 1, "probes": 0, "lam": 1}
FORBIDDEN = [24, 57]
"""Words that the model likes, and that its generation configuration forbids."""
SETTINGS = KNNSettings(
    k=8, probes=None, mixer=FixedLambda(0.4), temperature=8.0, selection=Selection(domains=("first",))
)
EVERY_COMPONENT = replace(
    SETTINGS, ngrams=NGramSettings(order=3, lam=0.3), cache=CacheSettings(size=8, temperature=8.0, lam=0.2)
)
NEW = 10


def prepare(name, folder):
    """Save a model, and a store with two domains of pairs."""
    model = make_model(name)
    model.generation_config.bad_words_ids = [[token] for token in FORBIDDEN]
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    lm = knnstore.create(folder / "home", str(folder / "model"), max_length=48)
    with lm.store:
        lm.add(PAIRS, domain="first", tags=["t"])
        lm.add([{**pair, "text": "w5 w6"} for pair in PAIRS[:2]], domain="second")
    return folder / "home"


@pytest.fixture(scope="module")
def pair_home(tmp_path_factory):
    return prepare("marian", tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def lm(pair_home):
    opened = knnstore.load(pair_home)
    with opened.store:
        yield opened


@pytest.fixture(scope="module")
def server(listen, pair_home):
    return listen(pair_home, require_keys=False)


def complete(server, **fields):
    body = {"model": "tiny+first", "temperature": 0, "knn": MIXED, **fields}
    answer = server.call("POST", "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts_of(answer):
    return [choice["text"] for choice in answer["choices"]]


def generate(lm, sources, new=NEW, **options):
    """The texts of `generate` without forced ends; it counts a token that it forces to be the first one."""
    new += len(lm.reader.prefix) - 1
    lm.generation_config.forced_eos_token_id = None
    return [lm.generate_text(source, new, knn=SETTINGS, **options) for source in sources]


@pytest.mark.parametrize(
    "name", ["m2m_100", *(pytest.param(name, marks=pytest.mark.slow) for name in ("marian", "t5"))]
)
def test_a_greedy_translation_is_that_of_generate(inside, tmp_path, name):
    """The source is one of several, alone, or given as tokens; decoders count positions in different ways."""
    home = prepare(name, tmp_path)
    server = inside(home, require_keys=False)
    with (lm := knnstore.load(home)).store:
        expected = generate(lm, SOURCES)
        found = complete(server, prompt=SOURCES, max_tokens=NEW)
        assert texts_of(found) == expected
        unruled = generate(lm, SOURCES, bad_words_ids=[[60]])
        assert any(f"w{token}" in text for text in unruled for token in FORBIDDEN)
        ids = [lm.reader.document_tokenizer.tokenize_sources([source])[0].tolist() for source in SOURCES]
        assert texts_of(complete(server, prompt=ids[2], max_tokens=NEW)) == expected[2:3]
        assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
        cut = complete(server, prompt=SOURCES[0], max_tokens=1)["choices"][0]
        assert (expected[0].startswith(cut["text"]), cut["finish_reason"]) == (True, "length")
        # A translation ends by itself; without a limit it may have as many tokens as with `translate`.
        alone = complete(server, prompt=SOURCES[0])
        assert texts_of(alone) == generate(lm, SOURCES[:1], 2 * len(ids[0]) + 20)


def generate_alone(lm, task, index):
    """The tokens of one text by definition: each from a pass over the whole of it, without a KV cache."""
    prompt = task.prompts[index // task.copies]
    tokens, draws = [*prompt.tokens], random.Random(f"{task.sampling.seed}:{index}")
    for _ in range(task.max_tokens):
        ids = torch.tensor([prompt.source])
        with torch.inference_mode():
            output = lm(ids, decoder_input_ids=torch.tensor([tokens]), knn=task.knn, use_cache=False)
        log_p = output.logits[0, -1].double().log_softmax(-1).numpy()
        log_p[FORBIDDEN] = -np.inf
        if task.sampling.temperature == 0:
            tokens.append(int(log_p.argmax()))
        else:
            p = np.exp(log_p / task.sampling.temperature)
            tokens.append(int(np.searchsorted(p.cumsum() / p.sum(), draws.random(), side="right")))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt.tokens) :]


def test_texts_that_are_decoded_side_by_side_are_what_each_is_alone(lm):
    """Each request begins when the one before has three tokens, so the texts are of unequal length."""
    rng, tasks, counts = np.random.default_rng(0), list[Task](), set[int]()
    for number in range(12):
        chosen = rng.choice(SOURCES, 1 + number % 2, replace=False)
        prompts = tuple(
            Prompt(lm.reader.prefix, len(lm.reader.prefix), source=tuple(map(int, tokens)))
            for tokens in lm.reader.document_tokenizer.tokenize_sources([*map(str, chosen)])
        )
        sampling = Sampling(temperature=float(number % 3), seed=number)
        knn = (KNNSettings(lam=0.0), SETTINGS, EVERY_COMPONENT)[number % 4 % 3]
        tasks.append(Task(prompts, knn, max_tokens=15, copies=1 + number % 3 // 2, sampling=sampling))
    engine = Engine(
        lm, lambda scope: scope, max_waiting=100, observe=lambda _: counts.add(len(engine._heavy))
    )
    listeners = [Listener(task) for task in tasks]

    def hear_and_submit(number, heard):
        """Return a function that submits the next task with the third piece of this one."""

        def hear(piece):
            heard(piece)
            if len(listeners[number].pieces) == 3:
                engine.submit(listeners[number + 1].ticket)

        return hear

    for number, listener in enumerate(listeners[:-1]):
        listener.ticket.tell = hear_and_submit(number, listener.ticket.tell)
    engine.start()
    try:
        engine.submit(listeners[0].ticket)
        for task, listener in zip(tasks, listeners, strict=True):
            for index, (tokens, _, _) in listener.written().items():
                assert tokens == generate_alone(lm, task, index)
    finally:
        engine.stop()
    assert max(counts) > 2


def test_beams_and_guidance_of_the_generation_configuration_are_left_out_of_the_rules(lm, monkeypatch):
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 1, "guidance_scale": 2.0}
    for option, value in options.items():
        monkeypatch.setattr(lm.generation_config, option, value)
    rules = make_generation_rules(lm, Prompt(lm.reader.prefix, 1, source=(5, EOS)), 10)
    assert rules(torch.tensor([lm.reader.prefix]), torch.zeros(1, 61))[0, FORBIDDEN].isinf().all()


def test_requests_of_many_clients_are_answered_as_each_alone(server, lm):
    expected = {(source, new): generate(lm, [source], new)[0] for source in SOURCES[:4] for new in (4, 30)}
    asked = [*expected] * 3
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda one: complete(server, prompt=one[0], max_tokens=one[1]), asked)
    for one, answer in zip(asked, found, strict=True):
        assert texts_of(answer) == [expected[one]]


def test_a_stream_and_stop_strings_and_several_texts(server):
    """The pieces of a stream add up to the whole answer."""
    fields = {"prompt": SOURCES[0], "n": 3, "temperature": 1, "seed": 5, "max_tokens": 20}
    texts = texts_of(complete(server, **fields))
    assert len({*texts}) > 1
    with server.client().completions.create(
        model="tiny+first", stream=True, extra_body={"knn": MIXED}, **fields
    ) as stream:
        streamed = ["", "", ""]
        for chunk in stream:
            streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    longest = max(range(3), key=lambda index: len(texts[index]))
    stop = texts[longest].split()[2]
    cut = complete(server, stop=[stop], **fields)["choices"][longest]
    assert (cut["text"], cut["finish_reason"]) == (texts[longest][: texts[longest].index(stop)], "stop")


def test_log_probabilities_are_those_of_the_forward_pass(server, lm):
    choice = complete(server, prompt=SOURCES[1], logprobs=2, max_tokens=NEW)["choices"][0]
    tokens = [*lm.tokenizer.convert_tokens_to_ids(choice["text"].split()), EOS]
    listed = choice["logprobs"]["token_logprobs"]
    source = lm.tokenizer(SOURCES[1], return_tensors="pt")
    with torch.inference_mode():
        ids = torch.tensor([[*lm.reader.prefix, *tokens[:-1]]])
        rows = lm(**source, decoder_input_ids=ids, knn=SETTINGS).logits[0].log_softmax(-1)
    expected = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
    np.testing.assert_allclose(listed, expected, atol=1e-5)


def test_scopes_choose_the_pairs_and_sources_name_them(server):
    pair = PAIRS[0]
    asked = {"prompt": pair["source"], "knn": {**SURE, "sources": 1}}
    found = complete(server, **asked)
    assert texts_of(found) == [pair["text"]]
    sources = found["choices"][0]["knn"]["sources"]
    assert [one["text"].strip() for one in sources] == [*pair["text"].split(), "</s>"]
    for one in sources:
        assert one["neighbors"][0]["document"] == pair["id"]
        assert one["neighbors"][0]["source_text"] == pair["source"]
    assert texts_of(complete(server, prompt=pair["source"], model="tiny+second", knn=SURE)) == ["w5 w6"]
    for chosen in ({"tags": ["t"]}, {"domains": ["first"]}, {"where": "source != 'x'"}):
        wider = {"model": "tiny+first+second", "knn": {**SURE, **chosen}}
        assert texts_of(complete(server, prompt=PAIRS[5]["source"], **wider)) == [PAIRS[5]["text"]]


def test_an_explanation_reads_the_source(server, lm):
    pair = HELD_OUT[0]
    body = {"model": "tiny+first", "text": pair["text"], "source": pair["source"], "knn": MIXED}
    found = server.call("POST", "/v1/explain", json=body).json()
    expected = lm.explain(pair["text"], SETTINGS, source=pair["source"])
    assert [token["text"] for token in found["data"]] == [token.text for token in expected]
    for token, other in zip(found["data"], expected, strict=True):
        assert token["p"] == pytest.approx(other.p, rel=1e-4)
    del body["source"]
    refused = server.call("POST", "/v1/explain", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "source")


def test_pairs_are_added_listed_and_removed(listen, pair_home, tmp_path):
    server = listen(shutil.copytree(pair_home, tmp_path / "home"), require_keys=False)
    pair = {"id": "new", "source": "w7 w8 w9", "text": "w30 w31 w32", "client": "x"}
    body = {"domain": "third", "documents": [pair, {"id": "other", "source": "w40", "text": "w41"}]}
    added = server.call("POST", "/v1/documents", json=body).json()
    assert (added["added"], added["tokens"]) == (2, 6)
    asked = {"model": "tiny+third", "prompt": pair["source"], "knn": SURE}
    assert texts_of(complete(server, **asked)) == [pair["text"]]
    chosen = {"domain": "third", "id": "new"}
    (shown,) = server.call("GET", "/v1/documents", params={**chosen, "text": True}).json()["data"]
    assert (shown["text"], shown["metadata"]) == (pair["text"], {"client": "x", "source": pair["source"]})
    body["documents"] = [{**pair, "id": "good"}, {"id": "bad", "text": "w5"}]
    refused = server.call("POST", "/v1/documents", json=body)
    assert (refused.status_code, "no 'source'" in refused.text) == (400, True)
    assert not server.call("GET", "/v1/documents", params={"id": "good"}).json()["data"]
    assert server.call("DELETE", "/v1/documents", params=chosen).json()["deleted"]
    assert not server.call("GET", "/v1/documents", params=chosen).json()["data"]
    assert texts_of(complete(server, **asked)) != [pair["text"]]


def test_tokens_of_sources_count_against_the_limit_of_a_key(listen, pair_home, tmp_path):
    server = listen(shutil.copytree(pair_home, tmp_path / "home"))
    _, key = server.keys.add([Right.WRITE], tokens=10)
    for status in (200, 429):
        body = {"domain": "third", "documents": [{"id": str(status), "source": "w7 " * 20, "text": "w30"}]}
        assert server.call("POST", "/v1/documents", key, json=body).status_code == status


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": " "}, "the source is empty"),
        ({"prompt": "w5 " * 48}, "49 tokens are too many: this model reads at most 48"),
        ({"prompt": [5, 61]}, "is not among the model's 61 tokens"),
        ({"max_tokens": 49}, "this model generates at most 48 tokens, not 49"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"echo": True}, "echo: an encoder-decoder model does not score its prompt"),
        ({"suffix": "w5"}, "cannot fill in the middle"),
        ({"num_beams": 5}, "this server has no beam search"),
    ],
)
def test_what_makes_no_sense_for_a_source_is_refused(server, fields, reason):
    body = {"model": "tiny", "prompt": "w5", **fields}
    refused = server.call("POST", "/v1/completions", json=body)
    assert refused.status_code == 400
    assert reason in refused.json()["error"]["message"]


def test_a_source_has_no_conversation_and_no_cursor(server):
    message = {"role": "user", "content": "w5"}
    refused = server.call("POST", "/v1/chat/completions", json={"model": "tiny", "messages": [message]})
    assert "does not support conversations" in refused.json()["error"]["message"]
    refused = server.call("POST", "/infill", json={"input_prefix": "w5"})
    assert "cannot fill in the middle" in refused.json()["error"]["message"]


def test_the_command_serves_pairs_without_vllm(pair_home, tmp_path):
    home = shutil.copytree(pair_home, tmp_path / "home")
    server = Server(home, "--model", "tiny").ready()
    try:
        assert texts_of(complete(server, prompt=PAIRS[1]["source"], knn=SURE)) == [PAIRS[1]["text"]]
        assert server.end() == 0
    finally:
        server.close()
    assert not [line for line in server.log() if "warm up" in str(line)]
    refused = call("--home", home, "serve", "--upstream", "http://127.0.0.1:9")
    assert (
        "--upstream needs a store of a causal model, and this store is for an encoder-decoder model"
        in refused.err
    )

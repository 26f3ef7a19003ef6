"""The engine: texts written together are what each would be alone."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import knnstore
from knnstore import KNNSettings, Selection
from knnstore.lm import CacheSettings, Drafts, NGramSettings, score_targets
from knnstore.lm.reading import allows_gaps
from knnstore.server.engine import (
    Engine,
    EngineBusyError,
    EngineStoppedError,
    Observed,
    Piece,
    Prompt,
    Sampling,
    Task,
    Ticket,
    admission,
    batch,
)
from knnstore.server.engine.prompts import Prefill

ENDS = {0, 264, 271}  # likely ones, so that texts end early
# All records that are selected count: which is the k-th nearest of fewer may hang on rounding.
SETTINGS = {
    "alone": KNNSettings(lam=0.0),
    "letters": KNNSettings(k=1024, lam=0.4, temperature=30.0, selection=Selection(domains=("letters",))),
    "news": KNNSettings(k=1024, lam=0.9, temperature=5.0, selection=Selection(domains=("news",))),
    "sea": KNNSettings(k=1024, lam=0.7, temperature=50.0, selection=Selection(tags=("sea",))),
    "cache": KNNSettings(
        k=1024, lam=0.5, temperature=30.0, cache=CacheSettings(size=20, temperature=20.0, lam=0.3)
    ),
    "n-grams": KNNSettings(k=1024, lam=0.5, temperature=30.0, ngrams=NGramSettings(order=4, lam=0.5)),
}
SETTINGS["scoring"] = replace(SETTINGS["cache"], scoring_only=("cache",))
WRITTEN = {**SETTINGS, "scoring": replace(SETTINGS["cache"], cache=None)}


@pytest.fixture(scope="module")
def lm(prepared):
    opened = knnstore.load(prepared)
    opened.generation_config.eos_token_id = [*ENDS]
    with opened.store:
        yield opened


@pytest.fixture
def engine(lm) -> Iterator[Engine]:
    started = Engine(lm, SETTINGS.__getitem__, max_rows=8, max_waiting=1000)
    started.start()
    yield started
    started.stop()


def run_turn(engine: Engine) -> None:
    """Runs a turn of the engine from work in its thread, to know what every turn does."""
    if engine._process_inbox(wait=False):
        engine._run_turn()


class Listener:
    """Collects the pieces of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.pieces: list[Piece] = []
        self.error: Exception | None = None
        self.done = threading.Event()
        self.ticket = Ticket(task, self._hear)
        self._left = len(task.prompts) * task.copies

    def _hear(self, piece: Piece | Exception) -> None:
        if isinstance(piece, Exception):
            self.error = piece
            self.done.set()
            return
        self.pieces.append(piece)
        self._left -= piece.finish is not None
        if not self._left:
            self.done.set()

    def written(self) -> dict[int, tuple[list[int], str, str | None]]:
        assert self.done.wait(240)
        assert self.error is None, self.error
        found: dict[int, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            found[piece.index].append(piece)
        return {
            index: (
                [score.token for piece in pieces for score in piece.tokens],
                "".join(piece.text for piece in pieces),
                pieces[-1].finish,
            )
            for index, pieces in found.items()
        }


def write_alone(lm, task: Task, index: int) -> list[int]:
    """The tokens of one text, each from a pass over the whole of it: no batch, no padding, no cache."""
    tokens = list(task.prompts[index // task.copies].tokens)
    begun, draws = len(tokens), random.Random(f"{task.sampling.seed}:{index}")
    while len(tokens) - begun < task.max_tokens:
        with torch.inference_mode():
            logits = lm(torch.tensor([tokens]), knn=WRITTEN[task.knn], use_cache=False).logits[0, -1]
        log_p = logits.double().log_softmax(-1).numpy()
        if task.sampling.temperature == 0:
            tokens.append(int(log_p.argmax()))
        else:
            p = np.exp(log_p / task.sampling.temperature)
            p /= p.sum()
            order = np.argsort(-p, kind="stable")
            needed = int(np.searchsorted(np.cumsum(p[order]), task.sampling.top_p)) + 1
            kept = np.zeros(len(p))
            kept[order[:needed]] = p[order[:needed]]
            bounds = np.cumsum(kept) / kept.sum()
            tokens.append(int((bounds <= draws.random()).sum()))
        if tokens[-1] in ENDS:
            break
    return tokens[begun:]


@pytest.mark.slow
@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_mixes_are_what_each_would_be_alone(lm, engine, count):
    rng = random.Random(0)
    texts = [
        "The harbour",
        "In the morning the boat",
        "The council said",
        "Prices",
        "é🙂 naïve",
        "winter " * 9,
    ]
    listeners = []
    for number in range(count):
        prompts = tuple(
            Prompt(tuple(lm.reader.tokenize(rng.choice(texts)).tolist()[: rng.choice([1, 2, 5, 50])]))
            for _ in range(rng.choice([1, 1, 1, 3]))
        )
        sampling = Sampling(rng.choice([0, 0, 0.7, 1.0, 1.6]), rng.choice([1.0, 0.9, 0.5]), number)
        task = Task(prompts, rng.choice(list(SETTINGS)), rng.randint(1, 16), rng.choice([1, 1, 2]), sampling)
        listeners.append(Listener(task))
        engine.submit(listeners[-1].ticket)
        if rng.random() < 0.3:  # the others have gone on when the next one comes
            listeners[rng.randrange(len(listeners))].done.wait(240)
    ended_early, sampled = 0, set()
    for listener in listeners:
        for index, (tokens, text, finish) in listener.written().items():
            assert tokens == write_alone(lm, listener.task, index), listener.task
            ended_early += finish == "stop"
            body = tokens[:-1] if finish == "stop" else tokens
            prompt = list(listener.task.prompts[index // listener.task.copies].tokens)
            whole, before = lm.reader.decode(prompt + body), lm.reader.decode(prompt)
            if not before.endswith("\ufffd"):
                assert whole == before + text
            sampled.add(tuple(tokens))
    assert ended_early > 0
    assert len(sampled) > count // 2


def test_greedy_text_is_that_of_generate(lm, engine):
    prompt = Prompt((*lm.reader.prefix, *lm.reader.tokenize("The council").tolist()), 1)
    listener = Listener(Task((prompt,), "news", 30, sampling=Sampling(0)))
    engine.submit(listener.ticket)
    expected = lm.generate_text("The council", max_new_tokens=30, do_sample=False, knn=SETTINGS["news"])
    tokens, text, finish = listener.written()[0]
    assert text + lm.reader.decode(tokens[-1:]) * (finish == "stop") == expected


@pytest.mark.slow
def test_a_text_alone_is_drafted_and_what_it_would_be_without(lm):
    """Others come and go meanwhile; only between them it takes fewer steps than tokens."""
    steps: list[Observed] = []
    engine = Engine(lm, SETTINGS.__getitem__, observe=steps.append)
    engine.start()
    texts = "The harbour", "The harbour, the harbour"
    prompts = [Prompt(tuple(lm.reader.tokenize(text).tolist())) for text in texts]
    samplings = [Sampling(0), Sampling(0.7, 0.9, 1), Sampling(1.0, 1.0, 2)]
    tasks = [Task((one,), "n-grams", 40, sampling=how) for one in prompts for how in samplings]
    beside = Task((prompts[0],), "letters", 3, sampling=Sampling(0))
    saved = 0
    for task in tasks:
        engine.call(lambda: None).result(60)  # until what was before was told of
        steps.clear()
        listener, other = Listener(task), Listener(beside)
        engine.submit(listener.ticket)
        tokens = listener.written()[0][0]
        assert tokens == write_alone(lm, task, 0)
        engine.call(lambda: None).result(60)
        assert sum(step.tokens for step in steps) == len(tokens)
        less = len(tokens) - 1 - sum(step.rows for step in steps)
        assert less == sum(step.accepted for step in steps) <= sum(step.drafted for step in steps)
        saved += less
        mixed = Listener(task)

        def come(mixed=mixed, other=other) -> None:
            engine.submit(mixed.ticket)
            for _ in range(3):
                run_turn(engine)
            engine.submit(other.ticket)

        engine.call(come).result(60)
        assert mixed.written() == listener.written()
        assert other.written()[0][0] == write_alone(lm, beside, 0)
    engine.stop()
    assert saved > 4


def test_texts_together_are_drafted_and_each_is_what_it_would_be_alone(lm, monkeypatch):
    """Drafts are right up to a random token, so each text gets another number of tokens from each step."""
    prompts = [Prompt(tuple(lm.reader.tokenize(text).tolist())) for text in ("The harbour", "Prices", "The")]
    tasks = [
        Task((prompt,), knn, most, sampling=how)
        for prompt, most in zip(prompts, (40, 23, 31), strict=True)
        for knn, how in (("n-grams", Sampling(0)), ("n-grams", Sampling(0.9, 0.9, 3)), ("news", Sampling(0)))
    ]
    expected = [write_alone(lm, task, 0) for task in tasks]
    known = {(*task.prompts[0].tokens, *text) for task, text in zip(tasks, expected, strict=True)}
    drawn, lengths = random.Random(0), set()

    def propose(each, texts, most):
        drafts = []
        for one, text, limit in zip(each, texts.copy(), most, strict=True):
            whole = [after for after in known if after[: len(text)] == tuple(text)]
            right = drawn.choice(whole)[len(text) :][: drawn.randint(0, 9)]
            draft = [*right, *(drawn.randrange(5, 250) for _ in range(drawn.randint(0, 3)))]
            drafts.append(np.array([] if one is None else draft[:limit], np.int64))
        lengths.add(tuple(map(len, drafts)))
        return drafts

    learned = []
    monkeypatch.setattr(
        Drafts, "learn", lambda _, drafted, accepted, cost: learned.append((drafted, accepted))
    )
    monkeypatch.setattr(batch, "propose_together", propose)
    steps: list[Observed] = []
    engine = Engine(lm, SETTINGS.__getitem__, max_rows=len(tasks), observe=steps.append)
    engine.start()
    listeners = [Listener(task) for task in tasks]
    engine.call(lambda: [engine.submit(listener.ticket) for listener in listeners]).result(60)
    assert [listener.written()[0][0] for listener in listeners] == expected
    engine.stop()
    assert any(len(set(one)) > 3 for one in lengths)
    assert sum(step.tokens for step in steps) == sum(map(len, expected))
    assert 30 < sum(step.accepted for step in steps) < sum(step.drafted for step in steps)
    saved = sum(map(len, expected)) - len(tasks) - sum(step.rows for step in steps)
    assert saved == sum(step.accepted for step in steps)
    assert np.sum(learned, axis=0).tolist() == [
        sum(step.drafted for step in steps), sum(step.accepted for step in steps)
    ]  # fmt: skip


def test_a_long_draft_leads_no_other_text_beyond_the_last_position(lm, monkeypatch):
    """One prompt leaves a single position of the model's window."""
    tasks = [
        Task((Prompt(tuple(range(5, 5 + length))),), "n-grams", most, sampling=Sampling(0))
        for length, most in ((lm.config.n_positions - 1, 2), (4, 20))
    ]
    monkeypatch.setattr(
        batch,
        "propose_together",
        lambda each, texts, most: [np.full(max(0, min(limit, 9)), 5) for limit in most],
    )
    engine = Engine(lm, SETTINGS.__getitem__)
    engine.start()
    listeners = [Listener(task) for task in tasks]
    engine.call(lambda: [engine.submit(listener.ticket) for listener in listeners]).result(60)
    for listener in listeners:
        assert listener.written()[0][0] == write_alone(lm, listener.task, 0)
    engine.stop()


def test_a_string_that_ends_one_text_of_a_batch_ends_it_within_a_draft(lm, monkeypatch):
    prompt = Prompt(tuple(lm.reader.tokenize("The harbour").tolist()))
    plain = Task((prompt,), "n-grams", 24, sampling=Sampling(0))
    tokens = write_alone(lm, plain, 0)
    text = lm.reader.decode(tokens)
    stop = text[len(text) // 2 :][:3]
    monkeypatch.setattr(
        batch,
        "propose_together",
        lambda each, texts, most: [
            np.array(tokens[len(known) - len(prompt.tokens) :][: min(limit, 15)], np.int64)
            for known, limit in zip(texts, most, strict=True)
        ],
    )
    steps: list[Observed] = []
    engine = Engine(lm, SETTINGS.__getitem__, observe=steps.append)
    engine.start()
    listeners = [Listener(plain), Listener(replace(plain, stops=(stop,)))]
    engine.call(lambda: [engine.submit(listener.ticket) for listener in listeners]).result(60)
    whole, stopped = (listener.written()[0] for listener in listeners)
    engine.stop()
    assert whole[0] == tokens
    assert stopped[1:] == (text[: text.index(stop)], "stop")
    assert len(steps) < 6


def test_gaps_change_nothing_where_they_are_allowed():
    """And where they are not, they would: attention that counts columns."""
    for name, options, is_allowed in (
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2}, True),
        ("llama", {"hidden_size": 32, "intermediate_size": 48}, True),
        ("mistral", {"hidden_size": 32, "intermediate_size": 48, "sliding_window": 6}, False),
        (
            "gpt_neo",
            {"hidden_size": 32, "window_size": 4, "attention_types": [[["global", "local"], 1]]},
            False,
        ),
    ):
        small = {"num_hidden_layers": 2, "num_layers": 2, "num_attention_heads": 2, "num_heads": 2}
        config = CONFIG_MAPPING[name](vocab_size=101, **{**small, "num_key_value_heads": 2, **options})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        tokens = torch.randint(5, 101, (1, 20))
        gapped = torch.cat([tokens[:, :8], torch.full((1, 7), 3), tokens[:, 8:]], 1)
        mask = torch.ones_like(gapped)
        mask[:, 8:15] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            plain = model(tokens, position_ids=torch.arange(20)[None]).logits[:, 8:]
            found = model(gapped, attention_mask=mask, position_ids=positions).logits[:, 15:]
        assert allows_gaps(model) == is_allowed
        assert torch.allclose(plain, found, atol=1e-5) == is_allowed


def test_gaps_are_refused_where_they_would_fill_the_mask_of_the_model():
    """GPT-Neo without local layers: the mask has as many columns as the model has positions."""
    shape = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_position_embeddings": 16}
    config = CONFIG_MAPPING["gpt_neo"](vocab_size=101, attention_types=[[["global"], 1]], **shape)
    model = AutoModelForCausalLM.from_config(config).eval()
    mask = torch.ones((1, 20), dtype=torch.int64)
    mask[:, 4:10] = 0
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        model(torch.full((1, 20), 5), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert not allows_gaps(model)


def test_prompts_are_scored_with_what_counts_in_scoring_only(lm, engine):
    prompt = Prompt(
        (*lm.reader.prefix, *lm.reader.tokenize("The harbour, the harbour, the harbour").tolist()), 1
    )
    listener = Listener(Task((prompt,), "scoring", 0, score_prompt=True, top=0))
    engine.submit(listener.ticket)
    assert listener.done.wait(240)
    with torch.inference_mode():
        log_probs = lm(torch.tensor([prompt.tokens]), knn=SETTINGS["cache"]).logits[0].log_softmax(-1)
    expected = log_probs[:-1].gather(1, torch.tensor(prompt.tokens)[1:, None])[:, 0].tolist()
    found = [score.log_prob for score in listener.pieces[0].tokens][1:]  # the first is scored by nobody
    assert found == pytest.approx(expected[-len(found) :], abs=1e-4)


@pytest.mark.slow
def test_a_cancelled_task_makes_room_and_the_others_go_on(lm, engine):
    prompt = Prompt(tuple(lm.reader.tokenize("The harbour").tolist()))
    listeners = [
        Listener(Task((prompt,), "letters", 80, sampling=Sampling(1.0, 1.0, seed))) for seed in range(12)
    ]
    for listener in listeners:
        engine.submit(listener.ticket)
    for listener in listeners[::2]:
        listener.ticket.cancelled = True
    for listener in listeners[1::2]:
        assert listener.written()[0][0] == write_alone(lm, listener.task, 0)
    assert engine.call(lambda: len(engine.rows)).result(60) == 0
    assert all(len(listener.pieces) < 80 for listener in listeners[2::2])


def test_a_full_engine_refuses_and_a_failing_task_fails_alone(lm):
    engine = Engine(lm, lambda name: SETTINGS[name], max_rows=2, max_waiting=3)
    engine.start()
    held, free = threading.Event(), threading.Event()
    blocking = engine.call(lambda: (held.set(), free.wait(240)))
    assert held.wait(240)
    prompt = Prompt(tuple(lm.reader.tokenize("The").tolist()))
    good, bad = (
        Listener(Task((prompt,), "news", 3)),
        Listener(Task((prompt,), "nothing", 3, score_prompt=True, top=0)),
    )
    engine.submit(good.ticket)
    engine.submit(bad.ticket)
    with pytest.raises(EngineBusyError):
        engine.call(lambda: None)
    free.set()
    blocking.result(60)
    assert len(good.written()[0][0]) <= 3
    assert bad.done.wait(240)
    engine.stop()
    with pytest.raises(EngineStoppedError):
        engine.submit(good.ticket)


def test_stopping_tells_whoever_waits(lm):
    engine = Engine(lm, SETTINGS.__getitem__)
    engine.start()
    prompt = Prompt(tuple(lm.reader.tokenize("The").tolist()))
    listeners = [Listener(Task((prompt,), "news", 10_000, sampling=Sampling(1.0, 1.0, 1))) for _ in range(30)]
    held = threading.Event()
    engine.call(held.wait)
    for listener in listeners:
        engine.submit(listener.ticket)
    late = engine.call(lambda: None)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    while not engine._stopping:  # the engine stands still: it can begin nothing before
        time.sleep(0.001)
    held.set()
    stopping.join(240)
    assert all(listener.done.is_set() for listener in listeners)
    assert all(isinstance(listener.error, EngineStoppedError) for listener in listeners)
    with pytest.raises(EngineStoppedError):
        late.result(0)


@pytest.mark.parametrize("knn", ["cache", "n-grams", "news"])
def test_a_prompt_read_in_parts_is_that_read_at_once(lm, knn):
    ids = lm.reader.tokenize("The council said the harbour wall was in the storm " * 5).tolist()[:60]
    whole, parts = (Prefill(lm, ids, is_scored=True, is_continued=False) for _ in range(2))

    def go_on(reading, most):
        part, came = reading.read_chunk(SETTINGS[knn], most)
        reading.scores += score_targets(lm, [part], [came], SETTINGS[knn], 3)
        return len(came)

    assert go_on(whole, 1000) == 59
    read = []
    while parts.tokens_left:
        read.append(go_on(parts, 7))
    assert sum(read) == 59 < 7 * len(read)
    one, other = whole.get_state(), parts.get_state()
    for column in zip(
        *(map(torch.cat, zip(*each.scores, strict=True)) for each in (other, one)), strict=True
    ):
        torch.testing.assert_close(*column, atol=1e-5, rtol=1e-5)
    for layer, again in zip(one.layers, other.layers, strict=True):
        torch.testing.assert_close(again, layer, atol=1e-5, rtol=1e-5)


def test_texts_go_on_beside_work_that_takes_long(lm, engine):
    prompt = Prompt(tuple(lm.reader.tokenize("The").tolist()))
    tasks = [Task((prompt,), "news", 60, sampling=Sampling(1.0, 1.0, seed)) for seed in range(40)]
    expected, task = next((text, one) for one in tasks if len(text := write_alone(lm, one, 0)) > 7)
    listener = Listener(task)
    seen: list[int] = []

    def work() -> None:
        engine.submit(listener.ticket)  # comes while it works
        for _ in range(20):
            run_turn(engine)
            seen.append(len(listener.pieces))

    engine.call(work).result(60)
    assert seen == [min(count, len(expected)) for count in range(2, 22)]  # the first comes with the second
    assert listener.written()[0][0] == expected


@pytest.mark.parametrize(("most", "begun"), [(1024, [3, 3]), (4, [2, 3]), (2, [1, 2])])
def test_who_comes_while_prompts_are_read_waits_for_no_step(lm, monkeypatch, most, begun):
    monkeypatch.setattr(admission, "_MAX_TURN_TOKENS", most)
    prompt = Prompt(tuple(lm.reader.tokenize("The harbour").tolist()[:2]))
    running, *coming = (
        Listener(Task((prompt,), knn, 90, sampling=Sampling(1.0, 1.0, 5)))
        for knn in ("alone", "news", "news", "news")
    )
    left, counted = coming[1:], []

    def settings_of(name):
        if name == "news" and left:  # the first is about to be read
            engine.submit(left.pop().ticket)
        return SETTINGS[name]

    def work() -> None:
        engine.submit(running.ticket)
        run_turn(engine)
        engine.submit(coming[0].ticket)
        for _ in begun:
            run_turn(engine)
            counted.append((sum(bool(one.pieces) for one in coming), len(running.pieces)))

    engine = Engine(lm, settings_of)
    engine.start()
    engine.call(work).result(60)
    engine.stop()
    assert counted == [*zip(begun, [3, 4], strict=True)]  # each time the other goes on by a token


def test_a_short_prompt_does_not_wait_for_a_long_one(lm, engine, monkeypatch):
    monkeypatch.setattr(admission, "_CHUNK_TOKENS", 4)
    ids = lm.reader.tokenize("The council said the harbour wall was in the storm").tolist()[:14]
    running, long, other, short = (
        Listener(Task((Prompt(tuple(tokens)),), "letters", 40, sampling=Sampling(1.0, 1.0, 5)))
        for tokens in (ids[:2], ids, ids[1:], ids[:3])
    )
    seen: list[list[bool]] = []

    def work() -> None:
        engine.submit(running.ticket)
        run_turn(engine)
        for listener in (long, other, short):
            engine.submit(listener.ticket)
        for _ in range(6):
            run_turn(engine)
            seen.append([bool(one.pieces) for one in (short, long, other)])

    engine.call(work).result(60)
    # Of the long ones 12 tokens are read, since three wait beside one text, then 4 a turn: 2 + 2, 4, 4, 3.
    assert [sum(of_one) for of_one in zip(*seen, strict=True)] == [6, 5, 2]
    for listener in (running, long, other, short):
        assert listener.written()[0][0] == write_alone(lm, listener.task, 0)


def test_what_prompts_of_one_pass_are_padded_to_counts(lm, engine, monkeypatch):
    monkeypatch.setattr(admission, "_MAX_TURN_TOKENS", 20)
    passes, prefill_together = [], admission.prefill_together

    def spied(lm, readings, settings):
        passes.append([reading.tokens_left for reading in readings])
        prefill_together(lm, readings, settings)

    monkeypatch.setattr(admission, "prefill_together", spied)
    ids = lm.reader.tokenize("The council said the harbour wall was in the storm").tolist()
    lengths = [9, 2, 2, 2, 2]
    listeners = [
        Listener(Task((Prompt(tuple(ids[:length])),), "news", 3, sampling=Sampling(1.0, 1.0, 5)))
        for length in lengths
    ]

    def work() -> None:
        for listener in listeners:
            engine.submit(listener.ticket)
        run_turn(engine)

    engine.call(work).result(60)
    assert passes == [[9, 2], [2, 2, 2]], "in one pass 45 places, for 17 tokens"
    for listener in listeners:
        assert listener.written()[0][0] == write_alone(lm, listener.task, 0)


def test_a_task_of_many_prompts_does_not_hold_up_another(lm, engine):
    prompt = Prompt(tuple(lm.reader.tokenize("The harbour").tolist()))
    order: list[str] = []
    tasks = {"many": Task((prompt,) * 40, "news", 2), "one": Task((prompt,), "news", 2)}
    listeners = {name: Listener(task) for name, task in tasks.items()}
    for name, listener in listeners.items():
        told = listener.ticket.tell
        listener.ticket.tell = lambda piece, name=name, told=told: (order.append(name), told(piece))
    engine.call(lambda: [engine.submit(listener.ticket) for listener in listeners.values()]).result(60)
    for listener in listeners.values():
        listener.written()
    assert order.index("one") < 4


def test_a_store_that_fails_for_some_texts_fails_no_others(lm):
    broken = threading.Event()

    def settings_of(name):
        if name == "letters" and broken.is_set():
            raise RuntimeError("the domain is damaged")
        return SETTINGS[name]

    prompt = Prompt(tuple(lm.reader.tokenize("The").tolist()))
    good, bad = (
        next(one for one in tasks if len(write_alone(lm, one, 0)) > 7)
        for tasks in (
            [Task((prompt,), knn, 40, sampling=Sampling(1.0, 1.0, seed)) for seed in range(40)]
            for knn in ("news", "letters")
        )
    )
    steps: list[Observed] = []
    engine = Engine(lm, settings_of, observe=steps.append)
    engine.start()
    listeners = [Listener(task) for task in (good, bad, good)]

    def work() -> None:
        for listener in listeners:
            engine.submit(listener.ticket)
        for step in range(4):
            broken.set() if step == 2 else None
            run_turn(engine)

    engine.call(work).result(60)
    assert listeners[1].done.wait(240)
    for listener in (listeners[0], listeners[2]):
        assert listener.written()[0][0] == write_alone(lm, good, 0)
    engine.stop()
    assert (len(listeners[1].pieces), str(listeners[1].error)) == (3, "the domain is damaged")
    generated = sum(len(listener.written()[0][0]) for listener in (listeners[0], listeners[2])) + 3
    assert sum(step.tokens for step in steps) == generated

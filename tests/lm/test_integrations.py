"""The model with a store in the hands of others: streamers, pipelines, the Trainer, lm-eval."""

import threading
from logging import WARNING

import pytest
import torch
from transformers import AutoModelForCausalLM, TextIteratorStreamer, Trainer, TrainingArguments, pipeline
from transformers.utils import logging

from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.store import Selection

SEQUENCE = [0, 40, 41, 42, 50, 51, 52, 40, 41, 60, 70, 71, 72, 90, 33, 44, 40, 13, 14, 15]
PROMPT = "<s> w40 w41 w42"
CONTINUATION = " ".join(f"w{token}" for token in SEQUENCE[4:])


@pytest.fixture
def knn_model(make_model, make_store):
    model = make_model("llama")
    return KNNLMForCausalLM(
        model, make_store(model, [SEQUENCE]), KNNSettings(k=4, temperature=0.01, lam=0.999)
    )


def encode(text):
    return torch.tensor([[0 if word == "<s>" else int(word[1:]) for word in text.split()]])


def test_streaming_gives_the_text_piece_by_piece(knn_model, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {"max_new_tokens": 16, "do_sample": False, "streamer": streamer}
    thread = threading.Thread(target=knn_model.generate, args=(encode(PROMPT),), kwargs=options)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).split() == CONTINUATION.split()
    assert sum(bool(piece) for piece in pieces) > 1


def test_concurrent_generations_keep_their_keys_apart(knn_model):
    """Each thread has its own prompt and its own settings on one shared model."""
    prompts = [torch.tensor([SEQUENCE[: 3 + i]]) for i in range(6)]
    settings = [None if i % 2 else KNNSettings(lam=0) for i in range(6)]

    def generate(i):
        return knn_model.generate(prompts[i], max_new_tokens=8, do_sample=False, knn=settings[i]).tolist()

    expected = [generate(i) for i in range(6)]
    found = [None] * 6

    def work(i):
        found[i] = generate(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_the_text_generation_pipeline(knn_model, tokenizer):
    generator = pipeline("text-generation", model=knn_model, tokenizer=tokenizer)
    outputs = generator(
        [PROMPT, "<s> w40"], batch_size=2, max_new_tokens=16, do_sample=False, return_full_text=False
    )
    assert outputs[0][0]["generated_text"].split() == CONTINUATION.split()
    assert outputs[1][0]["generated_text"].split()[:2] == ["w41", "w42"]


def test_trainer_evaluates_the_mixture(knn_model, tmp_path):
    rows = [SEQUENCE, SEQUENCE[::-1], SEQUENCE[5:] + SEQUENCE[:5]]
    data = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=3, report_to=[], use_cpu=True
    )
    trainer = Trainer(model=knn_model, args=arguments, eval_dataset=data)
    found = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        ids = torch.tensor(rows)
        log_probs = knn_model(ids).logits[:, :-1].gather(2, ids[:, 1:, None])
    assert found == pytest.approx(-log_probs.mean().item(), rel=1e-5)
    with torch.no_grad():
        assert found != pytest.approx(knn_model.base(ids, labels=ids).loss.item(), rel=0.01)


@pytest.mark.slow
def test_lm_eval_scores_the_mixture(knn_model, tokenizer):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=knn_model, tokenizer=tokenizer, batch_size=2, max_length=64)
    pairs = [(PROMPT, f" {CONTINUATION}"), ("w9 w8", " w7 w6 w5"), (PROMPT, " w99")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = harness.loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        ids, n = encode(context + continuation), len(continuation.split())
        with torch.no_grad():
            log_probs = knn_model(ids).logits[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        assert score == pytest.approx(log_probs[-n:].sum().item(), abs=1e-3)
        assert greedy == (continuation.strip() == CONTINUATION)


def test_a_saved_model_opens_its_store_again(make_lm, tmp_path):
    lm = make_lm({"stories": [" ".join(f"w{token}" for token in SEQUENCE[1:])]}, max_length=8, stride=4)
    lm.knn = KNNSettings(k=4, temperature=0.01, lam=1, selection=Selection(domains=("stories",)))
    lm.save_pretrained(tmp_path)
    lm.store.close()
    loaded = KNNLMForCausalLM.from_pretrained(tmp_path)
    with loaded.store, torch.no_grad():
        # The first window ends at the eighth token; up to there the keys are those of the store.
        predicted = loaded(torch.tensor([SEQUENCE[:7]])).logits[0].argmax(-1)
    assert loaded.knn == lm.knn
    assert predicted.tolist() == SEQUENCE[1:8]


@pytest.mark.slow
def test_a_saved_folder_is_taken_by_its_name(make_lm, tmp_path, caplog):
    """By the `Auto` classes, a pipeline and lm-eval, without a warning and with the very same numbers."""
    from lm_eval.models.huggingface import HFLM

    words = " ".join(f"w{token}" for token in SEQUENCE[1:])
    lm = make_lm({"stories": [words]}, max_length=8, stride=4)
    lm.knn = KNNSettings(k=4, temperature=0.01, lam=0.9)
    lm.save_pretrained(tmp_path / "saved")
    lm.store.close()
    folder, ids = str(tmp_path / "saved"), torch.tensor([SEQUENCE[:7]])
    logging.enable_propagation()
    try:
        auto = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        writes = pipeline("text-generation", model=folder)
        harness = HFLM(pretrained=folder, batch_size=1, max_length=64, device="cpu")
    finally:
        logging.disable_propagation()
    assert not [one.message for one in caplog.records if one.levelno >= WARNING]
    assert isinstance(auto, KNNLMForCausalLM)
    with torch.no_grad():
        expected = auto(ids).logits
        assert torch.equal(harness.model(ids).logits, expected)
        assert torch.equal(writes.model(ids).logits, expected)
        assert not torch.equal(auto.base(ids).logits, expected)
    assert expected[0].argmax(-1).tolist() == SEQUENCE[1:8]
    text = writes("w40 w41 w42", max_new_tokens=4, do_sample=False, return_full_text=False)
    assert len(text[0]["generated_text"].split()) == 4
    for model in (auto, writes.model, harness.model):
        model.store.close()

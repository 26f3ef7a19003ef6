"""Adding, evaluating, explaining and writing text, from documents on disk to numbers."""

import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import knnstore
from knnstore.datastore import tokens_from_ids
from knnstore.documents import TextDocument
from knnstore.errors import ConfigError, FingerprintMismatchError, InputError, ReadOnlyError
from knnstore.lm import CacheSettings, KNNSettings, NGramSettings, TokenTable
from knnstore.lm.calibration.scored_text import score_once
from knnstore.lm.reading import adding
from knnstore.lm.scoring import assign_blocks, compute_interval
from knnstore.lm.scoring import token_scores as scoring
from knnstore.store import EVERYTHING, SavedSettings, Selection
from tests.lm.phrases import words as random_words

RNG = np.random.default_rng(5)


words = partial(random_words, RNG)


@pytest.fixture
def lm(make_lm):
    made = make_lm(max_length=16, stride=8)
    yield made
    made.store.close()


def direct_log_probs(lm, text: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """log p_LM and key of every token, one forward pass a token, over the windows of the design."""
    ids = [lm.tokenizer.bos_token_id, *lm.tokenizer(text, add_special_tokens=False)["input_ids"]]
    mlp, kept = lm.base.transformer.h[-1].mlp, []

    def keep(_, args) -> None:
        states = args[0][0].numpy()
        latest = zip((1, 0.5, 0.35), states[::-1], strict=False)
        kept.append(sum(a * np.roll(state, back) for back, (a, state) in enumerate(latest)))

    hook = mlp.register_forward_pre_hook(keep)
    log_probs = []
    with torch.no_grad():
        for at in range(1, len(ids)):
            # The window that predicts token `at`: it ends at 16, 24, 32, ... tokens, or at the last.
            stop = min(len(ids), 16 if at < 16 else 16 + 8 * math.ceil((at + 1 - 16) / 8))
            start = max(0, stop - 16)
            logits = lm.base(torch.tensor([ids[start:at]])).logits[0, -1]
            log_probs.append(float(logits.log_softmax(-1)[ids[at]]))
    hook.remove()
    return np.array(log_probs), np.array(kept), ids[1:]


def test_perplexities_agree_with_a_direct_computation(lm) -> None:
    stored = {f"d{i}": words(n) for i, n in enumerate((1, 5, 15, 16, 17, 40, 63))}
    held_out = {f"t{i}": words(n) for i, n in enumerate((1, 9, 50))}
    added = lm.add(({"id": id, "text": text} for id, text in stored.items()), domain="d")
    assert (added.added, added.tokens) == (7, sum(len(text.split()) for text in stored.values()))
    keys, values = [], []
    for text in stored.values():
        _, key, tokens = direct_log_probs(lm, text)
        keys.append(key)
        values += tokens
    keys, values = np.concatenate(keys).astype(np.float16).astype(np.float64), np.array(values)
    base, mixed = [], []
    k, temperature, lam = 12, 3.0, 0.4
    for text in held_out.values():
        log_probs, queries, gold = direct_log_probs(lm, text)
        for log_p, query, token in zip(log_probs, queries, gold, strict=True):
            distances = ((keys - query) ** 2).sum(1)
            nearest = np.argsort(distances)[:k]
            weights = np.exp(-(distances[nearest] - distances.min()) / temperature)
            p_knn = weights[values[nearest] == token].sum() / weights.sum()
            base.append(log_p)
            mixed.append(math.log((1 - lam) * math.exp(log_p) + lam * p_knn))
    result = lm.evaluate(
        [{"id": id, "text": text} for id, text in held_out.items()],
        KNNSettings(k=k, temperature=temperature, lam=lam),
    )
    assert result.tokens == len(base) == 60
    assert result.base_ppl == pytest.approx(math.exp(-np.mean(base)), rel=1e-5)
    assert result.knn_ppl == pytest.approx(math.exp(-np.mean(mixed)), rel=1e-4)


def test_perplexity_after_removal_is_that_of_before_to_the_last_digit(lm) -> None:
    held_out = [words(30), words(30)]
    lm.add([words(40) for _ in range(4)], domain="a")
    before = lm.evaluate(held_out)
    lm.add([words(40) for _ in range(4)], domain="b")
    assert lm.evaluate(held_out).knn_ppl != before.knn_ppl
    lm.store.remove_domain("b")
    after = lm.evaluate(held_out)
    assert (after.base_ppl, after.knn_ppl) == (before.base_ppl, before.knn_ppl)


def test_more_neighbors_than_records_take_no_memory_and_change_nothing(lm, monkeypatch) -> None:
    stored = [TextDocument(str(at), words(30)) for at in range(5)]
    lm.add(stored, domain="d")
    every, more = (KNNSettings(k=k, temperature=9.0) for k in (150, 5_000))
    text, tokens = words(3), torch.tensor([[0, *range(40, 50)]])
    expected = lm.evaluate(stored, every, leave_out=True).knn_ppl
    explained, logits = lm.explain(text, every, neighbors=2), lm(tokens, knn=every).logits
    asked, search = [], lm.store.search
    monkeypatch.setattr(lm.store, "search", lambda q, k, s: asked.append((len(q), k)) or search(q, k, s))
    monkeypatch.setattr(scoring, "_MAX_NEIGHBORS", 7 * 150)  # few at once, and the same is found
    assert lm.evaluate(stored, more, leave_out=True).knn_ppl == pytest.approx(expected, rel=1e-6)
    assert lm.explain(text, more, neighbors=2) == explained
    assert max(queries * k for queries, k in asked) <= 7 * 150
    torch.testing.assert_close(lm(tokens, knn=more).logits, logits)
    assert max(k for _, k in asked) == 150


def test_a_pass_over_documents_that_are_left_out_has_fewer_neighbors_for_them(lm) -> None:
    stored = [TextDocument(str(at), words(40)) for at in range(3)]
    lm.add(stored, domain="d")
    scored = score_once(
        lm.store, lm.reader, stored,
        k=120, selection=EVERYTHING, left_out={stored[0].content_hash: [stored[0].content_hash]},
    )  # fmt: skip
    found = scored.distances.isfinite().sum(1)
    assert (found == torch.tensor([80, 120, 120])[scored.documents]).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"domain": None}, "the domain's name is NoneType, not a string"),
        ({"domain": ""}, "the domain's name is empty"),
        ({"domain": "d", "tags": "old"}, "tags must be a list: give ['old'], not 'old'"),
        ({"domain": "d", "tags": [7]}, "a tag is int, not a string"),
    ],
)
def test_what_names_no_domain_or_tag_changes_nothing(lm, given, said) -> None:
    lm.add([{"id": "1", "text": words(10)}], domain="d")
    before = lm.store.revision()
    for change in lm.add, lm.sync:
        with pytest.raises(InputError, match=re.escape(said)):
            change([{"id": "1", "text": words(5)}], **given)
    assert lm.store.revision() == before


@pytest.mark.parametrize("knn", [{"lam": 0.5}, 0.5, Selection()])
def test_settings_of_another_type_are_refused(lm, knn) -> None:
    for call in lm.evaluate, lm.explain, partial(lm.generate_text, max_new_tokens=1):
        with pytest.raises(ConfigError, match=r"settings must be KNNSettings\(\.\.\.\), not"):
            call(["text"] if call == lm.evaluate else "text", knn=knn)


def test_an_interrupted_run_goes_on_where_it_was(lm) -> None:
    rows = [{"id": str(i), "text": words(10)} for i in range(100)]

    def interrupted():
        yield from rows[:90]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lm.add(interrupted(), domain="d", commit_tokens=100)
    there = len(lm.store.documents())
    assert 0 < there < 90
    again = lm.add(rows, domain="d", commit_tokens=100)
    assert (again.unchanged, again.added) == (there, 100 - there)
    assert lm.store.verify() == []
    assert lm.store.datastore.count() == 1000


def test_documents_are_committed_in_time_however_slow_the_model_is(lm, monkeypatch) -> None:
    """Ten tokens a document, 1,000 tokens a second, of which 3,000 were expected by the model's size."""
    keys, now = lm.key_encoder.compute_keys, [0.0]

    def slowly(ids, at, source):
        now[0] += len(at) / 1000
        return keys(ids, at, source)

    monkeypatch.setattr(lm.key_encoder, "compute_keys", slowly)
    monkeypatch.setattr(adding, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    weights = sum(one.numel() for one in lm.base.parameters())
    monkeypatch.setattr(adding, "_ASSUMED_OPERATIONS", 3000 * 2 * weights)
    before = lm.store.revision()
    lm.add([words(10) for _ in range(100)], domain="d", commit_seconds=0.1)
    assert lm.store.revision() - before >= 1 + 6  # 300 tokens, then at most 100 in each group
    assert lm.store.datastore.count() == 1000


def test_a_domain_becomes_what_is_given(lm) -> None:
    rows = [{"id": str(i), "text": words(10)} for i in range(5)]
    lm.add(rows, domain="other")
    assert lm.sync(rows[:4], domain="d").added.added == 4
    changed = [rows[0], {**rows[1], "text": words(11)}, rows[4]]
    done = lm.sync(changed, domain="d")
    assert (done.added.unchanged, done.added.replaced, done.added.added) == (1, 1, 1)
    assert done.removed == ("2", "3")
    assert [one.id for one in lm.store.documents(domain="other")] == ["0", "1", "2", "3", "4"]
    problems: list[Exception] = []
    kept = lm.sync([rows[0], {"id": "1"}], domain="d", on_bad=problems.append)
    assert (kept.removed, len(problems)) == ((), 1)  # nobody knows which document the bad one is
    with pytest.raises(InputError, match="no document was given: d is not changed"):
        lm.sync([], domain="d")
    assert {one.id for one in lm.store.documents(domain="d")} == {"0", "1", "4"}


def test_only_what_changed_goes_through_the_model(lm) -> None:
    rows = [{"id": str(i), "text": words(10), "year": 2025} for i in range(4)]
    lm.add(rows, domain="d", tags=["old"])
    rows[1]["text"] = words(12)
    rows[2]["year"] = 2026
    added = lm.add(rows, domain="d", tags=["new"])
    assert (added.added, added.replaced, added.described, added.unchanged) == (0, 1, 3, 0)
    assert added.tokens == 12
    again = lm.add(rows, domain="d")
    assert (again.unchanged, again.tokens) == (4, 0)
    assert lm.store.document("2").metadata == {"year": 2026}
    assert {document.tags for document in lm.store.documents()} == {("new", "old")}


def test_new_tags_of_many_documents_are_few_commits(lm) -> None:
    rows = [{"id": str(i), "text": words(3)} for i in range(100)]
    lm.add(rows, domain="d")
    before = lm.store.info()["revision"]
    assert lm.add(rows, domain="d", tags=["new"]).described == 100
    assert len(lm.store.documents(tag="new")) == 100
    assert lm.store.info()["revision"] - before <= 2


def test_a_stored_document_is_reported_and_can_be_left_out(lm) -> None:
    texts = [words(30) for _ in range(3)]
    lm.add([{"id": str(i), "text": text} for i, text in enumerate(texts)], domain="d")
    settings = KNNSettings(k=4, temperature=0.1, lam=0.9)
    cheating = lm.evaluate([{"id": "twin", "text": texts[0]}, words(20)], settings)
    honest = lm.evaluate([{"id": "twin", "text": texts[0]}], settings, leave_out=True)
    assert cheating.stored == honest.stored == ("twin",)
    alone = lm.evaluate([texts[0]], settings)
    assert alone.knn_ppl < 2 < honest.knn_ppl
    others = Selection(documents=("1", "2"))
    assert honest.knn_ppl == lm.evaluate([texts[0]], KNNSettings(4, 0.1, selection=others, lam=0.9)).knn_ppl


def test_explanations_add_up_and_name_their_sources(lm) -> None:
    text = words(25)
    lm.add([{"id": "a", "text": text}, {"id": "b", "text": words(25)}], domain="d")
    start = " ".join(text.split()[:4])
    explained = lm.explain(
        " " + " ".join(text.split()[4:10]), KNNSettings(k=8, temperature=0.5, lam=0.5), after=start
    )
    assert [entry.position for entry in explained] == [4, 5, 6, 7, 8, 9]
    for entry in explained:
        assert entry.p == pytest.approx(entry.lam * entry.p_knn + (1 - entry.lam) * entry.p_lm, rel=1e-5)
        nearest = entry.neighbors[0]
        assert (nearest.document, nearest.domain, nearest.position) == ("a", "d", entry.position)
        assert nearest.text == entry.text
        assert nearest.continuation.split()[0] == text.split()[entry.position + 1]
        assert sum(source.share for source in entry.neighbors) == pytest.approx(1, rel=1e-5)
    alone = lm.explain("w5 w6", KNNSettings(k=8, lam=0.5, selection=Selection(documents=("b",))))
    assert {source.document for entry in alone for source in entry.neighbors} == {"b"}


def test_text_is_continued_from_the_store_and_seeds_repeat(lm) -> None:
    text = words(14)
    lm.add([{"id": "a", "text": text}], domain="d")
    sure = KNNSettings(k=1, temperature=0.1, lam=0.999)
    start, rest = " ".join(text.split()[:4]), text.split()[4:10]
    assert lm.generate_text(start, max_new_tokens=6, knn=sure, do_sample=False).split() == rest
    unsure = KNNSettings(k=1, lam=0.2)  # by default the store is so sure that two seeds may write the same
    sampled = [
        lm.generate_text(start, max_new_tokens=6, knn=unsure, do_sample=True, seed=seed) for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    with pytest.raises(InputError, match="window has 16 tokens"):
        lm.generate_text(words(12), max_new_tokens=6)


def test_settings_follow_the_scale_of_the_keys_and_are_found_again(lm) -> None:
    lm.add([words(60) for _ in range(5)], domain="d")
    keys = np.concatenate([keys for _, keys, _ in lm.store.datastore.iterate()])
    assert lm.knn.temperature == pytest.approx(keys.var(axis=0).sum() / 10, rel=1e-5)
    lm.store.save_settings(SavedSettings({"k": 3, "temperature": 2.0, "lambda": 0.1}), ["d"])
    lm.store.close()
    again = knnstore.load(lm.store.home.path)
    assert again.knn == lm.knn
    with pytest.raises(ReadOnlyError):
        again.add([words(3)], domain="d")
    again.store.close()


def test_another_model_at_the_same_place_is_refused(make_model, tokenizer, tmp_path) -> None:
    moved = tmp_path / "model"
    make_model("gpt2").save_pretrained(moved)
    tokenizer.save_pretrained(moved)
    knnstore.create(tmp_path / "home", model=str(moved)).store.close()
    other = make_model("gpt2")
    with torch.no_grad():
        other.transformer.wte.weight.mul_(1.1)
    other.save_pretrained(moved)
    with pytest.raises(FingerprintMismatchError):
        knnstore.load(tmp_path / "home")


def test_documents_come_from_a_datasets_stream(lm) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"id": i, "text": words(10), "label": i % 2} for i in range(20)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    assert lm.add(stream, domain="d").added == 20
    assert lm.store.document("7").metadata == {"label": 1}


def test_bad_documents_are_left_out_only_when_asked(lm) -> None:
    rows = [{"id": "1", "text": words(5)}, {"id": "2"}, {"id": "1", "text": words(5)}, words(1)]
    with pytest.raises(InputError, match="document 2: no 'text'"):
        lm.add(rows, domain="d")
    bad: list[InputError] = []
    assert lm.add(rows, domain="d", on_bad=bad.append).added == 2
    assert [str(error).split(":")[0] for error in bad] == ["document 2", "document 3"]


def test_a_condition_is_as_good_as_a_store_of_the_documents_that_meet_it(make_lm) -> None:
    rows = [{"id": f"{at}", "text": words(25), "year": 2015 + at} for at in range(8)]
    whole, part = make_lm({"a": rows[:5], "b": rows[5:]}), make_lm({"a": rows[4:5], "b": rows[5:7]})
    held_out = [words(30), words(20)]
    met = Selection(where="year >= 2019 and not year > 2021")
    everything = KNNSettings(
        k=16, temperature=5.0, lam=0.4, cache=CacheSettings(8, 5.0, 0.2), ngrams=NGramSettings(4, 0.3)
    )
    chosen = replace(everything, selection=met)
    assert whole.evaluate(held_out, chosen).knn_ppl == pytest.approx(
        part.evaluate(held_out, everything).knn_ppl
    )
    assert whole.evaluate(held_out, chosen).knn_ppl != pytest.approx(
        whole.evaluate(held_out, everything).knn_ppl
    )
    explained = whole.explain(held_out[0], chosen, neighbors=8)
    assert {source.document for token in explained for source in token.neighbors} == {
        "4", "5", "6", "(this text)",
    }  # fmt: skip
    prompt = torch.tensor([[0, 5, 6]])
    written = [
        one.generate(prompt, max_new_tokens=12, do_sample=False, knn=knn).tolist()
        for one, knn in ((whole, chosen), (part, everything))
    ]
    assert written[0] == written[1]


def test_documents_are_told_apart_and_intervals_are_over_them(lm) -> None:
    lm.add([words(60)], domain="a")
    held_out = [
        {"id": f"{at}", "text": words(12 + at), "domain": "x" if at % 3 else "y", "n": at} for at in range(9)
    ]
    settings = KNNSettings(k=8, temperature=5.0, lam=0.4)
    found = lm.evaluate([*held_out, {"id": "none", "text": "w9 w9"}], settings)
    alone = [lm.evaluate([one], settings) for one in held_out[:2]]
    for one, by_itself in zip(found.by_document, alone, strict=False):
        assert one.tokens == by_itself.tokens
        assert (one.base_ppl, one.knn_ppl) == pytest.approx((by_itself.base_ppl, by_itself.knn_ppl), rel=1e-5)
    assert [one.id for one in found.by_document] == [*(str(at) for at in range(9)), "none"]
    assert found.intervals.knn.ppl == pytest.approx(found.knn_ppl)
    assert found.intervals.change.ppl == pytest.approx(found.knn_ppl / found.base_ppl)
    losses = [(one.tokens, one.tokens * math.log(one.knn_ppl / one.base_ppl)) for one in found.by_document]
    lengths, sums = (np.array(column) for column in zip(*losses, strict=True))
    assert found.intervals.change == pytest.approx(tuple(compute_interval(sums, lengths)), rel=1e-5)
    groups = found.group_by("domain")
    assert {value: group.documents for value, group in groups.items()} == {"x": 6, "y": 3, None: 1}
    of_y = lm.evaluate([one for one in held_out if one["domain"] == "y"], settings)
    assert groups["y"].knn.ppl == pytest.approx(of_y.knn_ppl, rel=1e-5)
    assert groups["y"].change.ppl == pytest.approx(of_y.knn_ppl / of_y.base_ppl, rel=1e-5)
    assert groups["y"].knn.low < of_y.knn_ppl < groups["y"].knn.high
    frame = found.to_pandas()
    assert frame["tokens"].sum() == found.tokens
    assert frame["n"].tolist()[:9] == list(range(9))
    table = TokenTable()
    lm.evaluate(held_out, settings, table=table)
    assert len(table.to_pandas(lm.tokenizer)) == sum(12 + at for at in range(9))
    table = TokenTable()
    two = lm.evaluate([words(260), words(300)], settings, table=table)  # their blocks count
    blocks = assign_blocks(np.repeat([0, 1], [260, 300]))
    losses = -np.bincount(blocks, np.log(table.to_pandas(lm.tokenizer)["p"]))
    assert two.intervals.knn == pytest.approx(tuple(compute_interval(losses, np.bincount(blocks))), rel=1e-4)
    pairs = lm.neighbors(words(4), settings).to_pandas()
    assert (len(pairs), pairs["weights"].sum()) == (4 * 8, pytest.approx(4))


def test_half_precision_gives_nearly_the_same_keys(make_lm) -> None:
    text = words(30)
    found = []
    for dtype in ("float32", "bfloat16"):
        ids, keys, _ = next(make_lm({"d": [text]}, dtype=dtype).store.datastore.iterate())
        found.append((tokens_from_ids(ids), keys))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.allclose(found[0][1], found[1][1], atol=0.1)

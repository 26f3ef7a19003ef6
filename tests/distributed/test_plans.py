"""Plan, encode, commit: the same store as one process makes, whatever dies or changes in between."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import knnstore
from knnstore.distributed import Plan, PlanFolder, commit_plan, drop_plan, encode_shards, make_plan
from knnstore.errors import (
    CatalogError,
    ConfigError,
    DiskFullError,
    FingerprintMismatchError,
    InputError,
    PlanError,
)
from knnstore.lm import find_saved_settings
from knnstore.store import KNNStore, Lease, NewDocument
from tests.lm.seq2seq import make_model, make_pairs, make_tokenizer

WORDS = [f"w{token}" for token in range(5, 18)]


def write_documents(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    return [
        {"id": f"d{at}", "text": " ".join(draw.choice(WORDS, int(draw.integers(3, 24)))), "year": at}
        for at in range(count)
    ]


DOCUMENTS = write_documents(40)
PAIRS = make_pairs(40)


class Workshop:
    """A store in a folder, and the three calls with short names."""

    model: ClassVar[str]
    """Folder of the model that is used if no other is named; the fixture `small_model` makes it."""

    def __init__(self, path: Path, *, model: str | None = None, **options: Any) -> None:
        self.home, self.folder = path / "home", PlanFolder(path / "plan")
        made = knnstore.create(self.home, model or self.model, max_length=16, **options)
        self.tokenizer = made.tokenizer
        made.store.close()

    def plan(
        self, documents: Sequence[object] = DOCUMENTS, folder: Path | None = None, **options: Any
    ) -> Plan | None:
        place = self.folder if folder is None else PlanFolder(folder)
        options = {"domain": "news", "tags": ["fresh"], "shard_tokens": 120, **options}
        with KNNStore.open(self.home, "a") as store:
            assert self.tokenizer is not None
            return make_plan(store, self.tokenizer, documents, place, **options)

    def encode(self, workers: int = 1) -> None:
        for worker in range(workers):
            encode_shards(PlanFolder(self.folder.path), worker=worker, workers=workers)

    def commit(self, folder: Path | None = None) -> Any:
        with KNNStore.open(self.home, "a") as store:
            return commit_plan(store, PlanFolder(folder or self.folder.path))

    def drop(self) -> None:
        with KNNStore.open(self.home, "a") as store:
            drop_plan(store, PlanFolder(self.folder.path))

    def add(self, documents: Sequence[object], domain: str = "news") -> None:
        with knnstore.load(self.home, "a") as lm:
            lm.add(documents, domain=domain, tags=["fresh"])

    def remove(self, id: str) -> None:
        with KNNStore.open(self.home, "a") as store:
            store.remove_document(id)

    def ids(self) -> set[str]:
        with KNNStore.open(self.home) as store:
            return {document.id for document in store.documents()}

    def problems(self) -> list[str]:
        with KNNStore.open(self.home) as store:
            return store.verify()


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A workshop that each test copies."""
    return Workshop(tmp_path_factory.mktemp("empty"))


@pytest.fixture
def workshop(empty: Workshop, tmp_path: Path) -> Workshop:
    made = copy(empty)
    made.home, made.folder = tmp_path / "home", PlanFolder(tmp_path / "plan")
    shutil.copytree(empty.home, made.home)
    return made


def read_store(home: Path) -> tuple[Any, ...]:
    """Return the documents, record ids and domains of a store; its keys; its temperature."""
    with KNNStore.open(home) as store:
        documents = [
            (of.id, of.domain, of.tags, dict(of.metadata), of.content_hash, store.tokens(of.id).tolist())
            for of in store.documents()
        ]
        ids, keys, groups = zip(*store.datastore.iterate(), strict=True)
        saved = find_saved_settings(store)
        temperature = saved.query["temperature"] if saved else 0
        keys_alone = np.concatenate(keys)
        return (documents, np.concatenate(ids), np.concatenate(groups)), keys_alone, temperature


def check_same_store(found: Path, expected: Path) -> None:
    """Compare documents, ids, domains, keys and temperature of two stores."""
    rows, keys, temperature = read_store(found)
    expected_rows, expected_keys, expected_temperature = read_store(expected)
    assert rows[0] == expected_rows[0]
    for values, expected_values in zip(rows[1:], expected_rows[1:], strict=True):
        np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_allclose(keys, expected_keys, rtol=2e-3, atol=2e-3)
    assert temperature == pytest.approx(expected_temperature, rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"store": "hnswlib", "states": 1}, marks=pytest.mark.slow),
        {"store": "faiss", "dim": 4, "sample": DOCUMENTS},
        pytest.param({"params": {"codes": "int8"}}, id="codes", marks=pytest.mark.slow),
    ],
    ids=lambda options: options.get("store", "cells"),
)
def test_the_same_store_as_one_process_makes(tmp_path: Path, options: dict[str, Any]) -> None:
    one, many = Workshop(tmp_path / "one", **options), Workshop(tmp_path / "many", **options)
    for shop in (one, many):
        shop.add(DOCUMENTS[:5])
    changed = [{**DOCUMENTS[0], "text": "w20 w21"}, *DOCUMENTS[1:]]
    one.add(changed)
    plan = many.plan(changed)
    assert plan is not None
    assert len(plan.shards) > 3
    assert (plan.added, plan.replaced) == (35, 1)
    many.encode(workers=2)
    committed = many.commit()
    assert (committed.documents, committed.tokens, committed.skipped) == (36, plan.tokens, ())
    check_same_store(many.home, one.home)
    assert many.problems() == []
    assert not list(many.folder.path.rglob("*.keys"))


def save_pair_model(folder: Path) -> str:
    """Save an encoder-decoder model whose decoder begins with two tokens, and return its folder."""
    make_model("m2m_100").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"store": "faiss", "dim": 4, "sample": PAIRS}],
)
def test_pairs_are_encoded_with_their_sources(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"model": save_pair_model(tmp_path / "model"), **options}
    one, many = Workshop(tmp_path / "one", **options), Workshop(tmp_path / "many", **options)
    one.add(PAIRS)
    plan = many.plan(PAIRS, shard_tokens=60)
    assert plan is not None
    assert len(plan.shards) > 2
    many.encode(workers=2)
    assert many.commit().documents == len(PAIRS)
    check_same_store(many.home, one.home)
    assert many.problems() == []
    with pytest.raises(InputError, match="no 'source'"):
        many.plan([{"id": "x", "text": "w5"}])


def test_a_plan_of_pairs_reads_a_model_that_has_no_generation_configuration_of_its_own(
    tmp_path: Path,
) -> None:
    model = Path(save_pair_model(tmp_path / "model"))
    generation, config = (model / name for name in ("generation_config.json", "config.json"))
    config.write_text(json.dumps({**json.loads(config.read_text()), **json.loads(generation.read_text())}))
    generation.unlink()
    workshop = Workshop(tmp_path, model=str(model))
    plan = workshop.plan(PAIRS)
    assert plan is not None
    assert plan.prefix == (1, 4)


def test_pairs_of_other_languages_are_neither_planned_nor_encoded(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, model=save_pair_model(tmp_path / "model"))
    workshop.plan(PAIRS)
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "forced_bos_token_id": 7}))
    for call in (workshop.encode, lambda: workshop.plan(PAIRS, tmp_path / "second")):
        with pytest.raises(FingerprintMismatchError, match="other languages"):
            call()


def test_nothing_is_visible_before_the_commit_and_each_call_may_be_repeated(workshop: Workshop) -> None:
    workshop.add(DOCUMENTS[:1])
    plan = workshop.plan()
    assert workshop.plan() == plan  # the same documents again
    workshop.encode()
    files = {file: file.read_bytes() for file in workshop.folder.key_files.iterdir()}
    next(workshop.folder.key_files.glob("00001-*.keys")).unlink()
    workshop.encode()  # encodes what is missing, to the same bytes
    assert {file: file.read_bytes() for file in workshop.folder.key_files.iterdir()} == files
    assert workshop.ids() == {"d0"}
    assert workshop.problems() == []
    assert workshop.commit().documents == 39
    before = read_store(workshop.home)
    again = workshop.commit()
    assert (again.was_committed, again.documents) == (True, 0)
    assert str(read_store(workshop.home)) == str(before)
    assert workshop.plan() is None  # everything is stored
    workshop.remove("d3")
    assert workshop.commit().was_committed  # a second commit does not bring back what was removed
    assert "d3" not in workshop.ids()


def test_missing_and_damaged_shards_are_named_and_can_be_encoded_again(workshop: Workshop) -> None:
    workshop.plan()
    with pytest.raises(PlanError, match=r"shard 0 of \d+ is not encoded, .*: run `knnstore encode"):
        workshop.commit()
    workshop.encode()
    keys = next(workshop.folder.key_files.glob("00002-*.keys"))
    content = bytearray(keys.read_bytes())
    content[len(content) // 2] ^= 1
    keys.write_bytes(content)
    with pytest.raises(PlanError, match=r"^shard 2 of \d+ is damaged"):
        workshop.commit()
    keys.write_bytes(content[:-4])
    with pytest.raises(PlanError, match=r"^shard 2 of \d+ is damaged"):
        workshop.commit()
    assert workshop.ids() == set()
    workshop.encode()
    assert workshop.commit().documents == len(DOCUMENTS)
    assert workshop.problems() == []


def test_a_damaged_plan_is_refused(workshop: Workshop) -> None:
    workshop.plan()
    workshop.encode()
    rows = workshop.folder.plan_files / "00001.jsonl"
    rows.write_bytes(rows.read_bytes().replace(b'"d', b'"e', 1))
    with pytest.raises(PlanError, match=r"00001.jsonl or 00001.tokens is damaged"):
        workshop.commit()
    plan = workshop.folder.plan_files / "plan.json"
    plan.write_bytes(plan.read_bytes().replace(b"float16", b"float32"))
    for call in (workshop.commit, workshop.encode, workshop.plan):
        with pytest.raises(PlanError, match="damaged"):
            call()
    workshop.drop()
    assert not workshop.folder.path.exists()
    with KNNStore.open(workshop.home) as store:
        assert store.leases() == []


def test_changes_between_plan_and_commit_win(workshop: Workshop) -> None:
    """A document that was removed does not come back, and a newer version is not replaced."""
    workshop.add(DOCUMENTS[:4])
    changed = [{**document, "text": f"{document['text']} w19"} for document in DOCUMENTS[:4]]
    workshop.plan([*changed, *DOCUMENTS[4:8]])
    workshop.encode()
    workshop.remove("d1")
    newer = {**DOCUMENTS[2], "text": "w20 w21 w22"}
    workshop.add([newer, {**DOCUMENTS[5], "text": "w23 w24"}])
    committed = workshop.commit()
    assert set(committed.skipped) == {"d1", "d2", "d5"}
    assert committed.documents == 5
    with knnstore.load(workshop.home) as lm:
        texts = {of.id: lm.reader.decode(lm.store.tokens(of.id).tolist()) for of in lm.store.documents()}
    assert texts.keys() == {"d0", "d2", "d3", "d4", "d5", "d6", "d7"}
    assert texts["d2"].strip() == "w20 w21 w22"
    assert texts["d0"].strip() == changed[0]["text"]
    assert workshop.problems() == []


def test_documents_that_came_and_went_meanwhile_are_not_added(workshop: Workshop, tmp_path: Path) -> None:
    """They are left out, whether they were removed or renamed. Those of other domains and plans are not."""
    workshop.plan()
    workshop.encode()
    for _ in range(2):
        workshop.add(DOCUMENTS[:3])
        workshop.remove("d0")
    with KNNStore.open(workshop.home, "a") as store:
        store.rename("news", {"d1": "other"})
        store.remove_domain("news")
    workshop.add(DOCUMENTS[3:5], domain="elsewhere")
    with KNNStore.open(workshop.home, "a") as store:
        store.remove_domain("elsewhere")
    later = tmp_path / "later"
    workshop.plan(DOCUMENTS[:3], folder=later)
    committed = workshop.commit()
    assert set(committed.skipped) == {"d0", "d1", "d2"}
    assert workshop.ids() == {f"d{at}" for at in range(3, 40)}
    encode_shards(PlanFolder(later))
    assert workshop.commit(later).documents == 3
    assert workshop.problems() == []


def test_documents_of_earlier_plans_and_renamed_ones_do_not_come_back(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Their positions are lower than those of the plan."""
    workshop.add([{"id": "old", "text": "w20 w21"}])
    earlier = tmp_path / "earlier"
    workshop.plan(DOCUMENTS[:1], folder=earlier)
    workshop.plan(DOCUMENTS[:3])
    workshop.encode()
    encode_shards(PlanFolder(earlier))
    assert workshop.commit(earlier).documents == 1
    with KNNStore.open(workshop.home, "a") as store:
        store.rename("news", {"old": "d1"})
    workshop.remove("d0")
    workshop.remove("d1")
    assert set(workshop.commit().skipped) == {"d0", "d1"}
    assert workshop.ids() == {"d2"}


def test_tags_that_were_set_after_the_plan_are_kept(workshop: Workshop) -> None:
    workshop.add(DOCUMENTS[:2])
    workshop.plan([{**document, "text": "changed"} for document in DOCUMENTS[:2]])
    workshop.encode()
    with KNNStore.open(workshop.home, "a") as store:
        store.retag("d0", add=["private"], remove=["fresh"])
    workshop.commit()
    with KNNStore.open(workshop.home) as store:
        assert {of.id: of.tags for of in store.documents()} == {"d0": ("fresh", "private"), "d1": ("fresh",)}


def test_what_a_failed_commit_has_left_does_not_harm_the_next(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documents of the first attempt have the positions of the second."""
    workshop.plan()
    workshop.encode()
    with KNNStore.open(workshop.home, "a") as store:
        with monkeypatch.context() as patch:

            def fail(*_: object, **__: object) -> None:
                raise DiskFullError("no room")

            patch.setattr("knnstore.store.ingest.publish_documents", fail)
            patch.setattr("knnstore.store.ingest.delete_unfinished_documents", fail)
            with pytest.raises(DiskFullError):
                commit_plan(store, PlanFolder(workshop.folder.path))
        assert commit_plan(store, PlanFolder(workshop.folder.path)).documents == len(DOCUMENTS)
    assert workshop.ids() == {of["id"] for of in DOCUMENTS}
    assert workshop.problems() == []


def test_a_worker_that_comes_too_late_writes_nothing(workshop: Workshop) -> None:
    plan = workshop.plan()
    assert plan is not None
    late = PlanFolder(workshop.folder.path)
    keys = np.zeros((plan.shards[0].records, plan.identity.dim), plan.dtype)
    late.write_keys(plan.shards[0], keys)
    workshop.encode()  # complete shards are left out
    workshop.commit()
    with pytest.raises(PlanError, match="committed or dropped meanwhile"):
        late.write_keys(plan.shards[0], keys)
    workshop.drop()
    with pytest.raises(PlanError, match="committed or dropped meanwhile"):
        late.write_keys(plan.shards[0], keys)
    assert not workshop.folder.path.exists()


IMPOSSIBLE: dict[str, Callable[[dict[str, Any]], object]] = {
    "path": lambda plan: plan["shards"][0].update(number="../../evil/x"),
    "number": lambda plan: plan["shards"][0].update(number=1),
    "start": lambda plan: plan["shards"][1].update(start=0),
    "tokens": lambda plan: plan["shards"][0].update(tokens="x"),
    "batch": lambda plan: plan.update(batch_tokens="x"),
    "dtype": lambda plan: plan.update(dtype="object"),
    "shards": lambda plan: plan.update(shards=[]),
    "identity": lambda plan: plan["identity"].update(other=1),
    "domain": lambda plan: plan.pop("domain"),
}


def test_a_plan_with_impossible_values_is_refused(workshop: Workshop) -> None:
    """Also with a right hash, as a stranger can compute it."""
    workshop.plan()
    file = workshop.folder.plan_files / "plan.json"
    content = json.loads(file.read_text())
    for name, change in IMPOSSIBLE.items():
        values = json.loads(content["plan"])
        change(values)
        text = json.dumps(values)
        digest = hashlib.sha256(text.encode()).hexdigest()
        file.write_text(json.dumps({**content, "plan": text, "sha256": digest}))
        for call in (workshop.encode, workshop.commit):
            with pytest.raises(PlanError) as refused:
                call()
            assert "plan.json is damaged" in str(refused.value), name


def test_positions_of_other_documents_are_refused(workshop: Workshop) -> None:
    workshop.add(DOCUMENTS[:3])
    new = NewDocument("new", "news", "0" * 64, np.arange(5, dtype=np.uint32))
    for lease in (Lease("a" * 32, 0, 5, "", False), Lease("a" * 32, 1 << 30, (1 << 30) + 5, "", False)):
        with (
            KNNStore.open(workshop.home, "a") as store,
            pytest.raises(CatalogError, match="belong to other documents"),
            store.ingest_leased(lease) as ingest,
            ingest.add_part([new], [lease.start]),
        ):
            pass
    assert workshop.problems() == []


def test_two_plans_do_not_disturb_each_other(workshop: Workshop, tmp_path: Path) -> None:
    other = tmp_path / "other"
    workshop.plan(DOCUMENTS[:20])
    workshop.plan(DOCUMENTS[20:], folder=other, domain="more")
    encode_shards(PlanFolder(other))
    assert workshop.commit(other).documents == 20
    workshop.encode()
    with KNNStore.open(workshop.home) as reader:
        assert len(reader.ngrams().text.positions) == 20
        assert workshop.commit().documents == 20  # its positions are lower than those of stored documents
        counted = reader.ngrams().text
    assert workshop.problems() == []
    one = Workshop(tmp_path / "one")
    one.add(DOCUMENTS[:20])
    one.add(DOCUMENTS[20:], "more")
    np.testing.assert_array_equal(read_store(workshop.home)[0][1], read_store(one.home)[0][1])
    with KNNStore.open(one.home) as expected:
        np.testing.assert_array_equal(counted.symbols, expected.ngrams().text.symbols)


def test_dropping_a_plan_leaves_nothing(workshop: Workshop) -> None:
    workshop.add(DOCUMENTS[:1])
    before = str(read_store(workshop.home))
    workshop.plan()
    workshop.encode()
    with KNNStore.open(workshop.home, "a") as store:
        assert any(str(workshop.folder.path) in place for place in store.erase().unreached)
    workshop.drop()
    with KNNStore.open(workshop.home, "a") as store:
        assert not any("plan" in place for place in store.erase().unreached)
    assert not workshop.folder.path.exists()
    assert str(read_store(workshop.home)) == before
    with pytest.raises(PlanError, match="has no plan"):
        workshop.commit()
    workshop.plan()  # positions of the dropped plan stay unused
    workshop.encode()
    assert workshop.commit().documents == 39


def test_a_plan_whose_folder_is_lost_is_named_and_can_be_dropped(workshop: Workshop) -> None:
    workshop.add(DOCUMENTS[:1])
    plan = workshop.plan()
    assert plan is not None
    workshop.encode()
    shutil.rmtree(workshop.folder.path)
    (problem,) = workshop.problems()
    assert problem == (
        f"the folder {workshop.folder.path} of a plan is not on this machine "
        f"({plan.tokens:,} reserved positions, 0 uploaded records): if no other machine has it, "
        f"drop the plan with `knnstore plan {workshop.folder.path} --drop`"
    )
    with KNNStore.open(workshop.home, "a") as store:
        assert store.repair() == [problem]  # the folder may be on a disk that comes back
    workshop.drop()
    assert (workshop.problems(), workshop.ids()) == ([], {"d0"})


def test_a_plan_that_was_dropped_or_is_of_another_store_is_refused(
    workshop: Workshop, tmp_path: Path
) -> None:
    workshop.plan()
    workshop.encode()
    other = Workshop(tmp_path / "second")
    with pytest.raises(PlanError, match="another store"):
        other.commit(workshop.folder.path)
    with pytest.raises(PlanError, match="another store"):
        other.plan(folder=workshop.folder.path)
    with KNNStore.open(workshop.home, "a") as store:
        store.release(store.leases()[0].id)
    with pytest.raises(PlanError, match="was dropped"):
        workshop.commit()


def test_other_documents_other_models_and_bad_input_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        workshop.plan([*DOCUMENTS, {"id": "empty", "text": ""}])
    with pytest.raises(InputError):
        workshop.plan(domain="")
    assert not workshop.folder.path.exists()
    workshop.plan()
    with pytest.raises(PlanError, match="other documents"):
        workshop.plan(DOCUMENTS[1:])
    with pytest.raises(PlanError, match="a plan for the domain 'news', not 'law'"):
        workshop.plan(domain="law")
    with pytest.raises(ConfigError, match="between 0 and 1"):
        encode_shards(workshop.folder, worker=2, workers=2)
    stranger = shutil.copytree(Workshop.model, tmp_path / "stranger")
    weights = load_file(stranger / "model.safetensors")
    save_file(
        {name: torch.clone(of) + 1 for name, of in weights.items()},
        stranger / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(FingerprintMismatchError):
        encode_shards(workshop.folder, model=str(stranger))
    assert not workshop.folder.key_files.exists()


PLACES = [
    "plan.leased",
    "plan.written",
    "plan.renamed",
    "plan.keys.written",
    "plan.keys.renamed",
    "plan.keys.published",
    "commit.shard",
    "commit.before",
    "ingest.flushed",
    "catalog.publish.inside",
    "catalog.publish.after",
    "commit.after",
]


WITHOUT_PLAN = ["plan.leased", "plan.written"]
"""Places after which the store has reserved positions, and the folder has no plan."""
HALF_ADDED = ["commit.shard", "commit.before", "ingest.flushed", "catalog.publish.inside"]


@pytest.mark.parametrize(
    "place",
    [
        place
        if place in ("plan.renamed", "plan.keys.renamed", "commit.shard")
        else pytest.param(place, marks=pytest.mark.slow)
        for place in PLACES
    ],
)
def test_every_step_may_be_killed_and_is_then_repeated(
    workshop: Workshop, killed_at: Callable[[str, Callable[[], None]], bool], place: str
) -> None:
    workshop.add(DOCUMENTS[:1])

    def write_keys() -> None:
        """Write the keys of a shard, as `encode_shards` does after the model has run."""
        PlanFolder(workshop.folder.path).write_keys(shard, keys)

    work: Callable[[], object] = workshop.plan
    if not place.startswith("plan.") or place.startswith("plan.keys."):
        plan = workshop.plan()
        assert plan is not None
        workshop.encode()
        work = workshop.commit
    if place.startswith("plan.keys."):
        shard = plan.shards[1]
        keys = np.array(workshop.folder.open_keys(shard))
        for file in workshop.folder.key_files.glob("00001*"):
            file.unlink()
        work = write_keys
    assert killed_at(place, work)
    problems = workshop.problems()
    assert [("is not on this machine" in of, "half added" in of) for of in problems] == (
        [(True, False)] * (place in WITHOUT_PLAN) + [(False, True)] * (place in HALF_ADDED)
    )
    is_published = place in ("catalog.publish.after", "commit.after")
    assert workshop.ids() == ({of["id"] for of in DOCUMENTS} if is_published else {"d0"})
    if not is_published:
        workshop.plan()
        workshop.encode()
    workshop.commit()
    assert workshop.ids() == {of["id"] for of in DOCUMENTS}
    assert workshop.problems() == []
    with KNNStore.open(workshop.home) as store:
        assert [lease.is_committed for lease in store.leases()] == [True]
    assert not list(workshop.folder.path.rglob("*.keys"))

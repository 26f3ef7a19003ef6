"""Counts of n-grams: against dictionaries, whatever was added, replaced, removed or selected before."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knnstore.catalog import NewDocument
from knnstore.errors import DomainNotFoundError
from knnstore.store import (
    EVERYTHING,
    KNNStore,
    Matches,
    NGramCounts,
    Selection,
    counting,
)
from knnstore.store.ngrams import DEPTH, SortedText
from knnstore.store.ngrams.ranked_bits import RankedBits
from tests.kneser_ney import KneserNey

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=25), max_size=8)


def dense(counts, matches, at, order):
    """A row over the vocabulary for each context."""
    found = matches.next_token_distribution(at, order)
    rows = found.rest[:, None] * counts.unigrams
    np.add.at(rows, (found.rows, found.tokens), found.probs)
    return rows


@pytest.mark.slow
@given(
    texts=TEXTS, asked=TEXTS, order=st.integers(2, DEPTH), bits=st.sampled_from([3, 14, 20]), data=st.data()
)
def test_counts_of_some_documents_are_those_of_dictionaries(texts, asked, order, bits, data):
    vocabulary = 1 << bits  # keys of as many symbols as fit into 64 bits
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts))), bool)
    positions = 1000 * np.arange(len(texts))
    every = SortedText.from_texts([np.array(text, np.uint32) for text in texts], positions, vocabulary + 1)
    counts = NGramCounts(every.keep_documents(chosen), vocabulary)
    kept = {at: text for at, text in enumerate(texts) if chosen[at]}
    expected = KneserNey(kept.values(), order)
    begins = [at % 3 != 2 for at in range(len(asked))]  # others go on in the middle of a document
    matches = Matches.look_up_texts(counts, [np.array(text, np.uint32) for text in asked], begins)
    for text, first, begun in zip(asked, matches.firsts.tolist(), begins, strict=True):
        at = np.arange(first - begun, first + len(text))
        contexts = [[-1] * begun + text[: place + 1 - first] for place in at.tolist()]
        rows = [expected.probs(context, 4) for context in contexts]
        np.testing.assert_allclose(
            dense(counts, matches, at, order)[:, :4], np.reshape(rows, (-1, 4)), atol=1e-6
        )
        came = text[1 - begun :]  # no token comes after the last context
        gold = [row[token] for row, token in zip(rows, came, strict=False)]
        np.testing.assert_allclose(matches.target_probs(at[: len(came)], order), gold, atol=1e-6)
        places = matches.find_occurrences(at[: len(came)], order, 1000)
        for place, found, token, row, context in zip(at.tolist(), places, came, rows, contexts, strict=False):
            unigrams = (
                matches.next_token_distribution(np.array([place]), order).rest[0] * counts.unigrams[token]
            )
            assert sum(one.share for one in found) + unigrams == pytest.approx(row[token], abs=1e-6)
            for one in found:
                document, offset = divmod(one.position, 1000)
                there = [-1, *kept[document]]
                assert there[offset + 1] == token
                assert there[: offset + 1][-one.matched :] == context[-one.matched :]
            (few,) = matches.find_occurrences(np.array([place]), order, 2)  # of each length
            listed = 0
            for length in range(order - 1, 0, -1):
                there = sum(one.matched >= length for one in found)
                listed += min(2, there - listed)
                assert sum(one.matched >= length for one in few) == listed


@given(texts=TEXTS, asked=TEXTS, order=st.integers(2, DEPTH), data=st.data())
def test_ends_of_texts_have_the_distributions_of_whole_texts(texts, asked, order, data):
    """Steps of several texts in any order, as where texts are generated, drafted and taken back."""
    counts = NGramCounts(
        SortedText.from_texts([np.array(text, np.uint32) for text in texts], range(len(texts)), 9), 8
    )
    steps = [(row, stop) for row, text in enumerate(asked) for stop in range(len(text) + 1)]
    steps = data.draw(st.permutations(steps))
    for at in range(0, len(steps), 3):
        batch = steps[at : at + 3]
        ends = [asked[row][max(0, stop - order + 1) : stop] for row, stop in batch]
        begins = [row % 3 != 2 and stop < order - 1 for row, stop in batch]
        matches = Matches.look_up_ends(counts, ends, begins)
        found = dense(counts, matches, matches.firsts, order)
        for (row, stop), probs in zip(batch, found, strict=True):
            whole = Matches.look_up_texts(counts, [np.array(asked[row][:stop], np.uint32)], [row % 3 != 2])
            np.testing.assert_array_equal(probs, dense(counts, whole, whole.firsts + stop - 1, order)[0])


@given(texts=TEXTS, asked=TEXTS, order=st.integers(2, DEPTH), listed=st.sampled_from([1, 5, 1 << 18]))
def test_the_most_frequent_next_token_follows_the_longest_suffix(texts, asked, order, listed):
    """For whole texts and for ends of texts, with the probability that the whole distribution gives."""
    counts = NGramCounts(
        SortedText.from_texts([np.array(text, np.uint32) for text in texts], range(len(texts)), 9), 8
    )
    expected = KneserNey(texts, order)
    steps = [(row, stop) for row, text in enumerate(asked) for stop in range(len(text) + 1)]
    tokens, probs = [], []
    for row, stop in steps:
        context = ([-1] if row % 3 != 2 else []) + asked[row][:stop]
        length = expected.longest(context)
        suffix = context[len(context) - length :]
        stored = [[-1, *text] for text in texts]
        following = Counter(
            text[at + length]
            for text in stored
            for at in range(len(text) - length)
            if length and text[at : at + length] == suffix
        )
        tokens.append(min(following, key=lambda token: (-following[token], token), default=-1))
        probs.append(expected.probs(context, 8)[tokens[-1]] if following else 0.0)

    rows, stops = np.array(steps, np.int64).reshape(-1, 2).T
    begins = [row % 3 != 2 for row in range(len(asked))]
    whole = Matches.look_up_texts(counts, [np.array(text, np.uint32) for text in asked], begins)
    ends = [asked[row][max(0, stop - order + 1) : stop] for row, stop in steps]
    last = Matches.look_up_ends(counts, ends, [begins[row] and stop < order - 1 for row, stop in steps])
    for matches, at in ((whole, whole.firsts[rows] + stops - 1), (last, last.firsts)):
        found = matches.next_token_distribution(at, order)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("knnstore.store.ngrams.matches._LISTED_AT_ONCE", listed)
            tops = matches.find_top_tokens(at, found.suffixes)
        assert tops.tolist() == found.find_top_tokens().tolist() == tokens
        np.testing.assert_allclose(matches.token_probs(at, tops, order), probs, atol=1e-6)
        np.testing.assert_allclose(found.token_probs(tops, counts.unigrams), probs, atol=1e-6)


@pytest.mark.parametrize("order", [3, 7, DEPTH])
def test_the_end_of_a_text_is_extended_by_its_last_token(order, monkeypatch) -> None:
    """A step looks up no n-gram of which the last step has all but the last token."""
    text = np.random.default_rng(0).integers(0, 5, 200)
    counts = NGramCounts(SortedText.from_texts([text.astype(np.uint32)], [0], 6), 5)
    looked_up, ranges = [], NGramCounts.find_symbol_ranges
    monkeypatch.setattr(
        NGramCounts, "find_symbol_ranges", lambda self, symbols: looked_up.append(1) or ranges(self, symbols)
    )
    for stop in range(40, 60):
        Matches.look_up_ends(counts, [text[stop - order + 1 : stop].tolist()], [False])
    assert len(looked_up) <= (order - 1) + 19


@given(
    texts=TEXTS,
    asked=st.lists(st.integers(0, 4), max_size=12),
    order=st.integers(2, DEPTH),
    vocabulary=st.sampled_from([5, 65_532, 65_533]),  # symbols of two bytes, and of four
)
def test_the_longest_suffix_is_told_with_its_count_and_successors(texts, asked, order, vocabulary):
    first = vocabulary - 5  # the texts are of the last tokens
    texts, asked = [[first + token for token in text] for text in texts], [first + one for one in asked]
    sorted_text = SortedText.from_texts(
        [np.array(text, int) for text in texts], np.arange(len(texts)), vocabulary + 1
    )
    assert sorted_text.symbols.itemsize == (2 if vocabulary < 65_533 else 4)
    counts = NGramCounts(sorted_text, vocabulary)
    matches = Matches.look_up_texts(counts, [np.array(asked, int)])
    found = matches.find_longest_suffixes(matches.firsts[0] - 1 + np.arange(len(asked) + 1), order)
    whole = [[-1, *text] for text in texts]
    for at in range(len(asked) + 1):
        context = [-1, *asked[:at]]
        longest = 0, 0, 0
        for length in range(1, min(order - 1, len(context)) + 1):
            after = [
                text[place + length]
                for text in whole
                for place in range(len(text) - length)
                if text[place : place + length] == context[-length:]
            ]
            longest = (length, len(after), len(set(after))) if after else longest
        assert (found.lengths[at], found.counts[at], found.successors[at]) == longest


@given(size=st.integers(0, 900), seed=st.integers(0, 99), data=st.data())
def test_bits_are_counted_and_found_in_ranges(size, seed, data):
    """In several blocks of 256 bits too."""
    bits = np.random.default_rng(seed).integers(0, 2, size).astype(bool).tolist()
    ranked = RankedBits.join_rows([RankedBits(np.array(of, bool)) for of in (bits[::-1], bits)])
    ends = st.lists(st.integers(0, len(bits)), min_size=2, max_size=2)
    pairs = np.array(data.draw(st.lists(ends.map(sorted), max_size=9)), np.int64).reshape(-1, 2)
    assert ranked.count(pairs.T, 1).tolist() == [sum(bits[start:stop]) for start, stop in pairs]
    owners, places = ranked.find_set_bits(pairs.T, np.ones(len(pairs), np.int64))
    assert list(zip(owners, places, strict=True)) == [
        (row, place) for row, (start, stop) in enumerate(pairs) for place in range(start, stop) if bits[place]
    ]


def add(store, rng, numbers, documents, *names):
    """Add or replace documents of a few different tokens."""
    texts = [rng.integers(0, 4, rng.integers(0, 30)).astype(np.uint32) for _ in names]
    new = [
        NewDocument(id, domain, f"{next(numbers):064x}", text, tags=frozenset({f"tag{len(text) % 2}"}))
        for (domain, id), text in zip(names, texts, strict=True)
    ]
    with store.ingest(new) as group:
        for at, text in enumerate(texts):
            keys = rng.standard_normal((len(text), store.identity.dim)).astype(np.float32)
            group.add(np.full(len(text), at), np.arange(len(text)), text.astype(np.int64), keys)
    documents.update(zip(names, new, strict=True))


def check(reader, selection, documents):
    """Compare what a reader says of a random text with dictionaries of what it should count."""
    counts = reader.ngrams(selection)
    asked = np.random.default_rng(5).integers(0, 4, 30)
    matches = Matches.look_up_texts(counts, [asked])
    at = matches.firsts[0] - 1 + np.arange(len(asked))
    expected = KneserNey([document.tokens for document in documents], 5)
    rows = [expected.probs([-1, *asked[:place]], 4) for place in range(len(asked))]
    np.testing.assert_allclose(dense(counts, matches, at, 5)[:, :4], rows, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [50, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_every_change_is_counted_as_if_the_store_had_never_held_anything_else(store, steps):
    rng, numbers, documents = np.random.default_rng(0), count(), {}
    with KNNStore.open(store.home.path) as reader:
        for step in range(steps):
            domain = f"domain{rng.integers(3)}"
            there = [name for name in documents if name[0] == domain]
            if there and rng.random() < 0.4:
                name = there[rng.integers(len(there))]
                store.remove_document(name[1], domain=domain)
                del documents[name]
            else:
                ids = rng.choice(12, rng.integers(1, 4), replace=False)  # some of which are there
                add(store, rng, numbers, documents, *((domain, f"{id}") for id in ids))
            live = list(documents.values())
            selections = [(EVERYTHING, live)]
            if live:
                domain = live[rng.integers(len(live))].domain
                of_domain = [one for one in live if one.domain == domain]
                selections.append((Selection(domains=(domain,)), of_domain))
                tag = next(iter(of_domain[0].tags))
                selections.append(
                    (Selection((domain,), (tag,)), [one for one in of_domain if tag in one.tags])
                )
                id = of_domain[0].id
                selections.append((Selection(documents=(id,)), [one for one in live if one.id == id]))
                out = of_domain[-1]
                selections.append(
                    (EVERYTHING.without_content(out.content_hash), [one for one in live if one is not out])
                )
            for selection, expected in selections[:: 1 if step % 4 == 0 else -1][:3]:
                check(reader, selection, expected)
                check(store, selection, expected)
        with pytest.raises(DomainNotFoundError):
            reader.ngrams(Selection(domains=("nowhere",)))


def test_they_are_the_same_wherever_the_keys_are_and_whatever_was_erased(store, tmp_path):
    rng, numbers, documents = np.random.default_rng(0), count(), {}
    add(store, rng, numbers, documents, *(("news", f"{id}") for id in range(9)))
    add(store, rng, numbers, documents, *(("mail", f"{id}") for id in range(9)))
    store.remove_domain("mail")
    live = [one for (domain, _), one in documents.items() if domain == "news"]
    with KNNStore.open(store.home.path) as reader:
        for change in (
            store.erase,
            lambda: store.move("hnswlib", "elsewhere"),
            store.repair,
        ):
            change()
            check(store, EVERYTHING, live)
            check(reader, EVERYTHING, live)
    with pytest.raises(DomainNotFoundError):
        store.ngrams(Selection(domains=("mail",)))


def test_beside_a_writer_each_document_counts_in_one_version(store):
    vocabulary, done = store.identity.vocab_size, threading.Event()

    def replace():
        for number in range(1000):
            if done.is_set():
                break
            text = np.full(50, number % vocabulary, np.uint32)
            with store.ingest([NewDocument("a", "news", f"{number:064x}", text)]) as group:
                keys = np.zeros((50, store.identity.dim), np.float32)
                group.add(np.zeros(50, int), np.arange(50), text.astype(np.int64), keys)

    with KNNStore.open(store.home.path) as reader, ThreadPoolExecutor() as threads:
        written = threads.submit(replace)
        versions = set()
        while len(versions) < 15 and not written.done():
            counts = reader.ngrams()
            tokens = np.flatnonzero(counts.unigrams)
            assert len(tokens) <= 1
            versions.update(tokens.tolist())
        done.set()
        written.result()
    assert len(versions) == 15


def test_counts_are_made_once_for_a_revision(store):
    rng, documents = np.random.default_rng(0), {}
    add(store, rng, count(), documents, ("news", "a"), ("news", "b"))
    counts = store.ngrams()
    assert store.ngrams() is counts
    store.remove_document("a")
    assert len(store.ngrams().text.order) == len(documents["news", "b"].tokens) + 1


def test_added_documents_are_counted_in_the_background(store, monkeypatch):
    rng, numbers, documents = np.random.default_rng(0), count(), {}
    add(store, rng, numbers, documents, ("news", "a"), ("news", "b"), ("mail", "c"))
    before, of_mail = store.ngrams(), store.ngrams(Selection(domains=("mail",)))
    store.count_ngrams_in_background()
    going, sort = threading.Event(), counting.SortedText.from_texts

    def wait_and_sort(*given):
        assert going.wait(120)
        return sort(*given)

    monkeypatch.setattr(counting.SortedText, "from_texts", wait_and_sort)
    add(store, rng, numbers, documents, ("news", "d"))
    assert store.ngrams() is before, "nobody waits for the thread that counts"
    assert store.ngrams(Selection(domains=("mail",))) is of_mail, "other domains need no counting"
    store.remove_document("a")
    left = len(documents["news", "b"].tokens) + len(documents["mail", "c"].tokens) + 2
    assert len(store.ngrams().text.order) == left, "what is removed counts no more"
    going.set()
    store.recount_changed_ngrams()
    del documents["news", "a"]
    assert len(store.ngrams().text.order) == left + len(documents["news", "d"].tokens) + 1
    check(store, EVERYTHING, documents.values())

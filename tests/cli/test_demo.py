"""The demonstration: nothing held out is stored, and what it prints is so."""

import knnstore as library
from knnstore import TextDocument
from knnstore.cli.commands import demonstrating as demo
from knnstore.cli.output import Bar


def test_no_paragraph_is_both_stored_and_held_out():
    for corpus in (demo.build_reference_corpus(), demo.build_library_corpus()):
        stored = {line for document in corpus.stored for line in document.text.split("\n")}
        held_out = [line for document in corpus.held_out for line in document.text.split("\n")]
        assert len(corpus.held_out) >= 5
        # A cut at the end of a document may leave the beginning of a paragraph.
        assert not stored & set(held_out[:-1])


def test_removing_a_domain_restores_every_digit(workplace, model):
    ngrams_lm = library.create("ngrams.knn", str(model), key=None)
    lm = library.create("keys.knn", str(model))
    texts = ["The harbour was quiet.", "The boat went out past the harbour wall.", "Grain is dear."]
    documents = [TextDocument(str(number), text * 5) for number, text in enumerate(texts)]
    corpora = [
        demo.Corpus("one", documents[:1], documents[1:2]),
        demo.Corpus("two", documents[1:2], documents[2:]),
    ]
    with ngrams_lm.store, lm.store, Bar() as bar:
        result = demo.demonstrate(ngrams_lm, lm, corpora, bar)
    assert result["restored"] is True
    alone, ngrams, first, both, after = (state["one"] for state in result["perplexity"])
    assert after == first
    assert len({alone, ngrams, first, both}) == 4


def test_without_the_checkout_it_asks_for_a_model(knnstore, monkeypatch, workplace):
    monkeypatch.setattr(library, "__file__", str(workplace / "site-packages" / "knnstore" / "__init__.py"))
    done = knnstore("demo")
    assert (done.status, done.out) == (1, "")
    assert done.err == "error: examples/tiny-lm is only in a checkout of the repository; give --model\n"

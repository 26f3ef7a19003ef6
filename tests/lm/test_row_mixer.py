"""A host other than transformers' `generate`: a loop with a row for each text, and settings for each row."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from knnstore.errors import ConfigError
from knnstore.lm import CacheSettings, KNNSettings, NGramSettings, TextState
from knnstore.lm.contexts import Contexts
from knnstore.lm.keys import KeyCapture
from knnstore.lm.reading import as_cache_argument
from knnstore.lm.row_mixer import RowMixer, Rows
from knnstore.store import Selection
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(7)
FIRST, SECOND = (phrases(RNG, 12) for _ in range(2))
ALL = KNNSettings(
    8, 6.0, lam=0.6, ngrams=NGramSettings(4, 0.4), cache=CacheSettings(30, 6.0, 0.2, NGramSettings(4, 0.3))
)
SCOPES = [replace(ALL, selection=Selection(domains=(name,))) for name in ("first", "second")]
STEPS = 20


@pytest.fixture(scope="module", params=["cells", "faiss"])
def lm(request, make_lm):
    texts = {"first": documents(RNG, FIRST, "f", 8), "second": documents(RNG, SECOND, "s", 8)}
    return make_lm(texts, store=request.param, max_length=64)


def step(lm, texts, tokens, cache, settings):
    """Read tokens of shape (b, t) on; returns the mixed logits after the last, shape (b, v)."""
    with torch.no_grad(), KeyCapture(lm.base, lm.key_encoder.location) as capture:
        output = lm.base(input_ids=tokens, use_cache=True, **as_cache_argument(lm.base, cache))
    keys, batch = lm.extend_texts(texts, tokens, capture.take_keys(*tokens.shape), None)
    last = np.arange(1, len(tokens) + 1) * tokens.shape[1] - 1
    rows = Rows(output.logits[:, -1], keys[:, -1], Contexts.from_pass(batch, lm.prefix_for(settings), last))
    return RowMixer(lm.store).mix(rows, settings)


@pytest.mark.slow
def test_a_loop_of_ones_own_generates_what_generate_does(lm) -> None:
    prompts = torch.tensor([lm.reader.tokenize(text)[:6].tolist() for text in (FIRST[0], SECOND[0])])
    texts, cache, tokens, written = [TextState(), TextState()], DynamicCache(), prompts, []
    for _ in range(STEPS):
        tokens = step(lm, texts, tokens, cache, SCOPES).argmax(1, keepdim=True)
        written.append(tokens)
    options = {"min_new_tokens": STEPS, "max_new_tokens": STEPS, "do_sample": False}
    expected, swapped = (
        torch.stack(
            [
                lm.generate(prompt[None], knn=settings, **options)[0, prompts.shape[1] :]
                for prompt, settings in zip(prompts, each, strict=True)
            ]
        )
        for each in (SCOPES, SCOPES[::-1])
    )
    assert torch.equal(torch.cat(written, 1), expected)
    assert not torch.equal(expected, swapped), "the scopes make no difference"


def test_rows_keep_their_scopes_and_a_row_alone_its_logits(lm) -> None:
    """Rows of three settings, out of order, beside each of them alone."""
    tokens = torch.tensor([lm.reader.tokenize(FIRST[1])[:9].tolist()] * 4)
    alone = KNNSettings(lam=0)
    each = [SCOPES[1], alone, SCOPES[0], SCOPES[1]]
    mixed = step(lm, [TextState() for _ in each], tokens, DynamicCache(), each)
    for row, settings in enumerate(each):
        expected = step(lm, [TextState()], tokens[:1], DynamicCache(), [settings])
        torch.testing.assert_close(mixed[row], expected[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(mixed[0], mixed[2])
    with pytest.raises(ConfigError, match="2 settings were given for 4 rows"):
        step(lm, [TextState() for _ in each], tokens, DynamicCache(), SCOPES)

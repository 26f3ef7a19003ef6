"""Settings for each row of a pass: every row is what it is in a pass with its settings for all."""

import pytest
import torch

import knnstore
from knnstore import KNNSettings, Selection
from knnstore.errors import ConfigError
from knnstore.lm import CacheSettings, NGramSettings

SETTINGS = [
    KNNSettings(k=8, temperature=30.0, lam=0.5),
    KNNSettings(lam=0.0),
    KNNSettings(k=4, temperature=9.0, lam=0.9, selection=Selection(domains=("news",))),
    KNNSettings(k=4, temperature=9.0, lam=0.2, cache=CacheSettings(size=8, temperature=9.0, lam=0.4)),
    KNNSettings(k=4, temperature=9.0, lam=0.2, ngrams=NGramSettings(order=3, lam=0.6)),
]


def test_each_row_has_its_settings(prepared):
    lm = knnstore.load(prepared)
    with lm.store, torch.inference_mode():
        ids = torch.randint(1, 290, (6, 12), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[4, :5] = 0
        rows = [SETTINGS[at] for at in (0, 2, 1, 3, 4, 3)]
        for kept in (0, 1, torch.tensor([3, 7])):
            options = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": kept}
            mixed = lm(**options, knn=rows).logits
            for row, settings in enumerate(rows):
                alone = lm(**options, knn=settings).logits[row]
                attended = slice(5, None) if row == 4 and isinstance(kept, int) and kept == 0 else slice(None)
                torch.testing.assert_close(mixed[row][attended], alone[attended], atol=1e-5, rtol=1e-5)
        with pytest.raises(ConfigError, match="2 settings were given for 6 texts"):
            lm(ids, knn=SETTINGS[:2])

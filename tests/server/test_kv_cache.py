"""What is remembered of a batch: each row is what it would be alone, wherever it lies."""

import random

import numpy as np
import torch

from knnstore.lm import TextState
from knnstore.server.engine.kv_cache import BatchCache
from knnstore.server.engine.prompts import extract_layers

HEADS, WIDTH, LAYERS = 2, 3, 2
MOST_COLUMNS = 64  # beside those of the longest text


def text_of(tokens: list[int]) -> TextState:
    text = TextState()
    text.append(np.array(tokens), torch.zeros(len(tokens), 1), None)
    return text


def test_rows_come_and_go_and_each_keeps_its_own():
    drawn, batch_cache, gaps = random.Random(0), BatchCache(), 0
    rows: list[tuple[list[int], torch.Tensor]] = []  # tokens; shape (layers, 2, heads, t, width)

    def values(count: int) -> torch.Tensor:
        made = torch.tensor([drawn.random() for _ in range(LAYERS * 2 * HEADS * count * WIDTH)])
        return made.reshape(LAYERS, 2, HEADS, count, WIDTH)

    for number in range(600):
        while rows and drawn.random() < (0.3 if number % 200 > 150 else 0.02):
            at = drawn.randrange(len(rows))
            batch_cache.remove_row(at)
            rows[at] = rows[-1]
            rows.pop()
        if not rows or (drawn.random() < 0.1 and len(rows) < 5):
            tokens = [drawn.randrange(100) for _ in range(drawn.choice([1, 7, 90]))]
            rows.append((tokens, values(len(tokens))))
            layers = [(keys[None], others[None]) for keys, others in rows[-1][1].unbind(0)]
            batch_cache.add_row(layers, text_of(tokens))
        count = drawn.choice([1, 1, 3, 17])
        new = [[drawn.randrange(100) for _ in range(count)] for _ in rows]
        cache = batch_cache.begin_step(count)
        texts, steps = cache.layers[-1].texts, [values(count) for _ in rows]
        for layer in range(LAYERS):  # a step that is tried again writes the same columns
            cache.update(*torch.stack([of_row[layer] for of_row in steps], 1), layer)
        for text, tokens in zip(texts, new, strict=True):
            text.append(np.array(tokens), torch.zeros(count, 1), None)
        if drawn.random() < 0.3:
            batch_cache.begin_step(count)
            for text, tokens in zip(texts, new, strict=True):
                text.append(np.array(tokens), torch.zeros(count, 1), None)
        mask = batch_cache.attention_mask(count).bool()
        assert mask.shape[1] == cache.get_seq_length() <= MOST_COLUMNS + max(len(one) for one, _ in rows)
        kept = [drawn.randint(0, count) for _ in rows]  # none is an error
        for at, (tokens, known) in enumerate(rows):
            assert texts[at].tokens(0, texts[at].length).tolist() == tokens + new[at]
            whole = torch.cat([known, steps[at]], 3)
            for layer, (keys, others) in enumerate(whole):
                held = extract_layers(cache)[layer]
                assert torch.equal(held[0][at][:, mask[at]], keys)
                assert torch.equal(held[1][at][:, mask[at]], others)
                assert not held[0][at][:, : int(mask[at].int().argmax())].any()  # padding has no NaN
            gaps += int((~mask[at, int(mask[at].int().argmax()) :]).sum())
            rows[at] = [*tokens, *new[at][: kept[at]]], whole[..., : len(tokens) + kept[at], :]
        batch_cache.keep_first_tokens(kept)
    assert gaps > 1000

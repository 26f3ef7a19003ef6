"""Decoding steps on a device: they wait for nothing before their token, and predict what the CPU predicts.

The device is simulated on the CPU (`simulated_device`), with the operations of torch in place of the kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import knnstore
from knnstore.errors import ModelOutputError
from knnstore.lm import (
    BinnedLambda,
    CacheSettings,
    DomainWeights,
    JointGate,
    KNNLMForCausalLM,
    KNNSettings,
    NGramSettings,
)
from knnstore.lm.mixing import Network
from knnstore.store import Selection
from tests.lm.phrases import documents, phrases
from tests.lm.simulated_device import NAME, SimulatedDevice, Wait

RNG = np.random.default_rng(5)
PHRASES = phrases(RNG, 20)
TEXTS = documents(RNG, PHRASES, "t", 24, of=5)
FACTORS = (0.5, 1.0, 2.0)
NGRAMS, CACHE = NGramSettings(5, 0.3), CacheSettings(20, 8.0, 0.4, NGramSettings(5, 0.3))
PROBED = KNNSettings(temperature=4.0, lam=0.2, probes=4)
STEPS = 5


@pytest.fixture(scope="module")
def home(make_lm) -> Path:
    """A store with codes in several cells, and a second domain of few keys in half precision."""
    params = {"cells": 8, "codes": "pq8", "coded_from": 200, "device": "none"}
    lm = make_lm({"a": TEXTS[:16], "b": TEXTS[16:17]}, max_length=64, store="cells", params=params)
    lm.store.close()
    return lm.store.home.path


def gated(settings: KNNSettings) -> KNNSettings:
    """The settings with a gate over all their components, which was not fitted."""
    experts = {"keys": FACTORS, "n-grams": (1.0,)}
    widths = {"model": 2, "query": 32, "keys": 10, "n-grams": 6}
    if settings.cache is not None:
        experts |= {"cache": FACTORS, "own n-grams": (1.0,)}
        widths |= {"cache": 2, "own n-grams": 3}
    torch.manual_seed(0)
    width = sum(widths.values())
    outputs = 1 + sum(len(factors) for factors in experts.values())
    scale = torch.ones(width)
    # All documents begin with the same key. Which tokens are among the nearest 16 is arbitrary then.
    scale[widths["model"] + widths["query"] :][5 : widths["keys"]] = torch.inf
    network = Network(torch.zeros(width), scale, [0.0] * outputs).eval()
    torch.nn.init.normal_(network.layers[-1].weight)
    network.requires_grad_(requires_grad=False)
    listed = [[name, list(factors)] for name, factors in experts.items()]
    purpose = {"unit": 2.0, "experts": listed, "widths": {"n-grams": widths["n-grams"]}}
    return replace(settings, gate=JointGate(network.to_weights(purpose)))


SETTINGS: dict[str, Callable[[], KNNSettings]] = {
    "one weight": lambda: PROBED,
    "bins": lambda: replace(
        PROBED, mixer=BinnedLambda((5.0, 9.0), (0.6, 0.4, 0.1), (0.5, 1.0, 3.0)), ngrams=NGRAMS
    ),
    "domains": lambda: replace(PROBED, mixer=DomainWeights(("a", "b"), (0.3, 0.2), (1.0, 2.0))),
    "a selection": lambda: replace(PROBED, selection=Selection(documents=("t3", "t16")), ngrams=NGRAMS),
    "gate": lambda: gated(replace(PROBED, ngrams=NGRAMS)),
    "gate and cache": lambda: gated(replace(PROBED, ngrams=NGRAMS, cache=CACHE)),
}


@contextmanager
def on_device(home) -> Iterator[tuple[KNNLMForCausalLM, SimulatedDevice]]:
    """The model and the keys of a store on the simulated device."""
    with knnstore.load(home) as lm, SimulatedDevice() as device:
        datastore = lm.store.view().datastore
        datastore._policy = replace(datastore._policy, device=NAME)
        lm.base.to(NAME)
        yield lm, device


def prompts(lm: KNNLMForCausalLM) -> dict[str, Tensor]:
    """Two prompts, one of which is padded on the left."""
    return dict(lm.tokenizer([TEXTS[20].text[:60], TEXTS[3].text[:40]], return_tensors="pt", padding=True))


class Step(NamedTuple):
    """Waits and operations of a decoding step outside the base model, before and after its token's logits."""

    before: list[Wait]
    after: list[Wait]
    operations: list[str]
    copies: list[str]


class Recorder(LogitsProcessor):
    """Divides what a device records into steps; a step ends where the base model is called again."""

    def __init__(self, lm: KNNLMForCausalLM, device: SimulatedDevice) -> None:
        self.steps: list[Step] = []
        self._device = device
        lm.base.register_forward_pre_hook(self._begin)
        lm.base.register_forward_hook(self._enter)

    def _begin(self, *_: object) -> None:
        if self.steps:
            self.steps[-1] = self.steps[-1]._replace(after=self._device.waits)
        self._device.clear()

    def _enter(self, *_: object) -> None:
        self._device.clear()  # what the base model does is its own affair

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        device = self._device
        self.steps.append(Step(device.waits, [], device.operations, device.copies))
        device.clear()
        return scores


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_waits_for_nothing_before_its_token(home, name: str) -> None:
    """The host waits after the token: for whether texts have ended, the check of logits, and the token."""
    with knnstore.load(home) as lm:
        asked = prompts(lm)
        options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 2}
        expected = lm.generate(**asked, **options, knn=SETTINGS[name]())
    with on_device(home) as (lm, device):
        recorder = Recorder(lm, device)
        asked = {argument: value.to(NAME) for argument, value in asked.items()}
        found = lm.generate(**asked, **options, knn=SETTINGS[name](), logits_processor=[recorder])
        assert torch.equal(found.cpu(), expected)
    assert len(recorder.steps) == STEPS
    for step in recorder.steps[2:-1]:  # in the first two the store is loaded
        assert step.before == []
        assert [(what, where.split(" ")[-1]) for what, where in step.after] == [
            ("a number is read", "generate"),  # of transformers: has every text ended?
            ("copy to the host", "find_ended"),
            ("a number is read", "finish"),
            ("copy to the host", "get_texts_of_pass"),
            ("copy to the host", "_run_and_mix"),
        ]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pass_on_a_device_predicts_what_it_predicts_on_the_cpu(home, name: str) -> None:
    with knnstore.load(home) as lm, torch.no_grad():
        asked = prompts(lm)
        expected = lm(**asked, knn=SETTINGS[name]()).logits.log_softmax(-1)
    with on_device(home) as (lm, _), torch.no_grad():
        asked = {argument: value.to(NAME) for argument, value in asked.items()}
        found = lm(**asked, knn=SETTINGS[name]()).logits.log_softmax(-1).cpu()
    is_text = asked["attention_mask"].values.bool()
    torch.testing.assert_close(found[is_text], expected[is_text], rtol=1e-4, atol=1e-4)


def test_a_model_may_forbid_a_token(home) -> None:
    """A logit of -inf is no error, and the text is that of the CPU."""

    def forbid(module: object, arguments: object, output):
        output.logits[..., 7] = -torch.inf
        return output

    texts = []
    for opened in (knnstore.load(home), on_device(home)):
        with opened as given:
            lm = given[0] if isinstance(given, tuple) else given
            lm.base.register_forward_hook(forbid)
            asked = {argument: value.to(lm.base.device) for argument, value in prompts(lm).items()}
            made = lm.generate(**asked, max_new_tokens=STEPS, do_sample=False, pad_token_id=2, knn=PROBED)
            texts.append(made.cpu().tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_step_without_finite_logits_is_an_error(home, is_last: bool) -> None:
    """It is found one step later, or at the end of the text; what is sampled until then does not matter."""
    calls = 0

    def spoil(module: object, arguments: object, output):
        nonlocal calls
        calls += 1
        if calls == (STEPS if is_last else 3):
            output.logits = output.logits * torch.nan
        return output

    with on_device(home) as (lm, _):
        lm.base.register_forward_hook(spoil)
        asked = {argument: value.to(NAME) for argument, value in prompts(lm).items()}
        with pytest.raises(ModelOutputError, match="logits are NaN"):
            lm.generate(**asked, max_new_tokens=STEPS, do_sample=True, pad_token_id=2, knn=PROBED)
    assert calls == (STEPS if is_last else 3)


def test_the_simulated_device_records_what_a_program_waits_for() -> None:
    """And refuses to compute with tensors of both memories."""
    with SimulatedDevice() as device:
        keys = torch.arange(12.0, device=NAME).view(3, 4)
        keys[keys > 4].sum().item()
        keys.tolist()
        keys[:, [0, 2]] += torch.tensor([1.0, 2.0], device=NAME)
        assert keys[0].tolist() == [1.0, 1.0, 4.0, 3.0]
        assert {what for what, _ in device.waits} == {
            "a boolean mask selects", "a number is read", "copy to the host", "copy to the device"
        }  # fmt: skip
        device.clear()
        torch.ones(3).to(NAME, non_blocking=True).add_(keys[:, 0]).unsqueeze(1)
        assert (device.waits, device.operations, len(device.copies)) == ([], ["aten.add_"], 1)
        with pytest.raises(RuntimeError, match="in main memory"):
            keys + torch.ones(4)

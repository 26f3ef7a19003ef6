"""A component of another package: configured, mixed, fitted, explained, saved, loaded and served as it is."""

import importlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import knnstore
from knnstore.errors import ConfigError
from knnstore.lm import DistributionComponent, KNNSettings, settings_for, settings_from_dict, settings_to_dict
from knnstore.lm.components import DistributionFitting, NGramSettings, registry
from knnstore.lm.components.distribution import Places
from tests.lm.phrases import words
from tests.server.conftest import Server

PACKAGE = '''
"""The words of a text's title, its first three, are likely in all the rest of it."""

import torch

from knnstore.lm import DistributionComponent


class TitleWords(DistributionComponent):
    name = "title"

    def distribution(self, reader, contexts, settings, vocabulary):
        weights, tokens = torch.zeros(len(contexts), 3), torch.zeros(len(contexts), 3, dtype=torch.long)
        for row, (text, length) in enumerate(zip(contexts.owners, contexts.lengths)):
            if text >= 0 and length >= 3:
                tokens[row] = torch.tensor(contexts.texts[text][:3].astype("int64"))
                weights[row] = 1 / 3
        return weights, tokens
'''
ENTRY_POINTS = "[knnstore.components]\ntitle = title_words:TitleWords\n"
RNG = np.random.default_rng(11)
LAM = 0.4
LAMBDAS = np.linspace(0, 1, 101).tolist()


def titled(count: int, name: str) -> list[dict[str, str]]:
    """Documents of words that are drawn anew, but for those of the title, which come half of the time."""
    made = []
    for number in range(count):
        title, rest = words(RNG, 3, 4, 99).split(), words(RNG, 60, 4, 99).split()
        text = [str(RNG.choice(title)) if RNG.random() < 0.5 else word for word in rest]
        made.append({"id": f"{name}{number}", "text": " ".join([*title, *text])})
    return made


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "title_words.py").write_text(PACKAGE)
    described = folder / "title_words-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: title-words\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(package)
    importlib.invalidate_caches()
    registry._load_installed_components.cache_clear()
    yield
    registry._load_installed_components.cache_clear()


@pytest.fixture(scope="module")
def filled(make_lm) -> Path:
    with make_lm({"d": titled(6, "s")}, max_length=64, stride=32).store as store:
        return store.home.path


@pytest.fixture
def title(installed) -> KNNSettings:
    return KNNSettings(lam=0.0, others={"title": {"lam": LAM}})


def p_title(tokens: list[int]) -> float:
    """What the component gives to the last token of a text."""
    return tokens[:3].count(tokens[-1]) / 3 if len(tokens) > 3 else 0.0


def test_it_is_mixed_wherever_text_is_read(lm, title) -> None:
    (text,) = titled(1, "t")
    tokens = lm.reader.tokenize(text["text"]).tolist()
    ids = torch.tensor([[0, *tokens]])
    with torch.no_grad():
        base = lm.base(ids).logits[0].float().softmax(-1)
        mixed = lm(ids, knn=title).logits[0].float().exp()
    expected = [
        (1 - LAM) * base[at, token] + LAM * p_title(tokens[: at + 1]) if at >= 3 else base[at, token]
        for at, token in enumerate(tokens)
    ]
    found = torch.stack([mixed[at, token] / mixed[at].sum() for at, token in enumerate(tokens)])
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-4)
    evaluated = lm.evaluate([text], title)
    assert np.log(evaluated.knn_ppl) == pytest.approx(-float(torch.stack(expected).log().mean()), rel=1e-4)
    explained = lm.explain(text["text"], title)[10]
    assert explained.shares["title"] == pytest.approx(LAM)
    assert explained.p == pytest.approx(float(expected[10]), rel=1e-4)
    prompt = ids[:, :20]
    out = lm.generate(
        prompt, knn=title, max_new_tokens=5, do_sample=False, pad_token_id=2, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    with torch.no_grad():
        whole = lm(out.sequences, knn=title, use_cache=False).logits[0, 19:-1]
    torch.testing.assert_close(torch.cat(out.logits), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("networks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_fitted_saved_and_loaded(lm, networks) -> None:
    found = lm.calibrate(titled(20, "h"), networks=networks)
    names = [candidate.name for candidate in found.comparison.candidates]
    assert "title" in names
    assert any(name.endswith(" + title") for name in names)
    assert found.record is not None
    assert 0.2 < found.settings.others["title"]["lam"] < 0.7
    if networks:
        (gated,) = [one for one in found.comparison.candidates if one.name == "gate over all"]
        assert "title" in gated.settings.gate.factors
    lm.store.close()
    with knnstore.load(lm.store.home.path) as again:
        assert again.knn.others == found.settings.others
        test = titled(4, "e")
        assert again.evaluate(test).knn_ppl < 0.8 * again.evaluate(test, KNNSettings(lam=0.0)).knn_ppl


def test_lambda_is_fitted_with_the_settings_of_the_look_up() -> None:
    class Sharpened(DistributionComponent):
        """Raises its probabilities to a power, which is one of its settings."""

        name = "sharpened"
        default_settings: ClassVar = {"lam": 0.1, "power": 1.0}

        def distribution(self, reader, contexts, settings, vocabulary):
            raise NotImplementedError

        def weigh(self, found, settings):
            powers = found.weights ** settings["power"]
            return super().weigh(found._replace(weights=powers / powers.sum(1, keepdim=True)), settings)

    targets = torch.from_numpy((RNG.random(500) < 0.2).astype(np.int64))
    found = Places(torch.tensor([[0.7, 0.3]]).expand(500, 2), torch.tensor([[0, 1]]).expand(500, 2))
    model, every = torch.full((500,), 0.5).log(), torch.ones(500, dtype=torch.bool)
    for power in 1.0, 4.0:
        settings = {"lam": 0.1, "power": power}
        fitting = DistributionFitting(Sharpened(), found, targets, settings)
        fitted = fitting.fit(model, every)
        losses = {lam: -float(fitting.mix(model, {**settings, "lam": lam}).mean()) for lam in LAMBDAS}
        assert fitted == {**settings, "lam": pytest.approx(min(losses, key=losses.__getitem__), abs=0.02)}


def test_its_settings_are_checked_by_name(title) -> None:
    with pytest.raises(ConfigError, match="'title' has no setting 'size'; known: lam"):
        KNNSettings(others={"title": {"size": 3}})
    with pytest.raises(ConfigError, match="lambda of the component 'title' must be between 0 and 1, got 2"):
        KNNSettings(others={"title": {"lam": 2}})
    assert KNNSettings(others={"title": {}}).others == {"title": {"lam": 0.1}}
    values = json.loads(json.dumps(settings_to_dict(title)))
    assert settings_from_dict(values) == replace(title, unset=frozenset())
    assert title.without_components("title").others == {}


def test_without_the_package_its_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no component 'title' is installed"):
        KNNSettings(others={"title": {"lam": 0.1}})


def test_settings_of_one_component_leave_those_of_the_others(title, monkeypatch) -> None:
    class Twin(type(registry.load_plugin_components()["title"])):
        name = "twin"

    monkeypatch.setitem(registry._registered, "twin", Twin())
    both = title.with_part("twin", {"lam": 0.2}).with_part("n-grams", NGramSettings(3))
    assert both.parts == {"title": {"lam": LAM}, "twin": {"lam": 0.2}, "n-grams": NGramSettings(3)}
    assert title.parts == {"title": {"lam": LAM}}


@pytest.mark.usefixtures("installed")
def test_distributions_of_several_groups_of_positions_have_the_same_width() -> None:
    several = Places(torch.tensor([[0.4, 0.6]]), torch.tensor([[3, 4]]))
    joined = Places.concatenate([several, Places(torch.tensor([[1.0]]), torch.tensor([[5]]))])
    assert joined.width == 2
    assert torch.equal(joined.weights, torch.tensor([[0.4, 0.6], [1.0, 0.0]]))
    assert joined.tokens[0].tolist() == [3, 4]
    assert joined.tokens[1, 0] == 5


def test_a_name_that_is_taken_is_refused() -> None:
    class Keys(DistributionComponent):
        name = "keys"

        def distribution(self, reader, contexts, settings, vocabulary):
            raise NotImplementedError

    with pytest.raises(ConfigError, match="names its component 'keys'"):
        knnstore.lm.register_component(Keys)


@pytest.mark.slow
def test_it_is_served(lm, title, package, tmp_path, monkeypatch) -> None:
    knnstore.lm.save_settings(lm.store, replace(title, unset=frozenset()))
    (text,) = titled(1, "t")
    with torch.no_grad():
        ids = torch.tensor([[0, *lm.reader.tokenize(text["text"]).tolist()]])
        expected = lm(ids, knn=settings_for(lm.store)).logits[0].log_softmax(-1)
    lm.store.close()
    home = Path(shutil.copytree(lm.store.home.path, tmp_path / "served"))
    monkeypatch.setenv("PYTHONPATH", str(package), prepend=":")
    server = Server(home)
    try:
        asked = {"model": "knn", "prompt": text["text"], "max_tokens": 1, "echo": True, "logprobs": 1}
        model = server.ready().call("GET", "/v1/models").json()["data"][0]["id"] + "+d"
        answer = server.call("POST", "/v1/completions", json={**asked, "model": model}).json()
    finally:
        server.close()
    found = answer["choices"][0]["logprobs"]["token_logprobs"][1:-1]
    gold = [float(expected[at + 1, token]) for at, token in enumerate(ids[0, 2:].tolist())]
    np.testing.assert_allclose(found, gold, atol=1e-3)

"""Stop strings of requests and of a model's generation configuration."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

import knnstore
from knnstore.errors import ConfigError
from knnstore.lm import KNNSettings
from knnstore.server.engine import find_stop_strings
from knnstore.server.engine.rows import StopStrings
from tests.server.conftest import make_model


def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether one came; searched again after each piece."""
    for text in accumulate(pieces):
        starts = [text.find(stop) for stop in stops if stop in text]
        if starts:
            return text[: min(starts)], True
    return "".join(pieces), False


@given(
    st.lists(st.text("ab", max_size=3), max_size=6),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_its_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    search, sent, is_ended = StopStrings(stops), "", False
    for piece in pieces:
        text, is_ended = search.append_text(piece)
        sent += text
        if is_ended:
            break
    assert (sent + search.release_held(), is_ended) == cut(pieces, stops)


def test_stop_strings_of_the_generation_configuration_end_a_text(inside, tmp_path) -> None:
    """As in `generate_text`, which keeps the string; a string of the request can end the text earlier."""
    model, home = make_model(tmp_path / "tiny"), tmp_path / "home"
    with knnstore.create(home, str(model)) as lm:
        lm.add([{"id": "a", "text": "The harbour wall is old."}], domain="letters")
        whole = lm.generate_text("The harbour", 40, do_sample=False, knn=KNNSettings(lam=0.0))
    late, early = whole[len(whole) // 2 :][:4], whole[len(whole) // 4 :][:4]
    GenerationConfig(stop_strings=[late]).save_pretrained(model)
    with knnstore.load(home) as lm:
        ended = lm.generate_text("The harbour", 40, do_sample=False, knn=KNNSettings(lam=0.0))
    application = inside(home, require_keys=False)

    def complete(**fields):
        body = {"model": "tiny", "prompt": "The harbour", "max_tokens": 40, "temperature": 0, **fields}
        answer = application.call("POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return choice["text"], choice["finish_reason"]

    assert complete() == (ended[: ended.index(late)], "stop")
    assert complete(stop=early) == (ended[: ended.index(early)], "stop")


@pytest.mark.parametrize(
    ("name", "value"), [("max_time", 3.0), ("stop_strings", [""]), ("stop_strings", [3])]
)
def test_stopping_settings_that_cannot_be_kept_are_refused(name, value) -> None:
    with pytest.raises(ConfigError, match=f"cannot be served: .*{name}.* generation_config.json"):
        find_stop_strings(GenerationConfig(**{name: value}))

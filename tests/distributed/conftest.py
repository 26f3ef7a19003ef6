"""A small random model for all plans."""

import pytest

from tests.distributed.test_plans import Workshop
from tests.lm.conftest import make_model, model_path, tokenizer

__all__ = ["make_model", "model_path", "small_model", "tokenizer"]


@pytest.fixture(scope="session", autouse=True)
def small_model(model_path: str) -> None:
    """Make the model of the workshops' stores: a GPT-2 of two layers."""
    Workshop.model = model_path

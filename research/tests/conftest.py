"""The fixtures of the product's own tests: small models and stores."""

from tests.conftest import *  # noqa: F403
from tests.lm.conftest import *  # noqa: F403

"""A server of OpenAI's protocol over a store. Needs the extra ``server``."""

from knnstore.server.running import Config, serve
from knnstore.server.serving import Limits

__all__ = ["Config", "Limits", "serve"]

"""Server of OpenAI's HTTP protocol over a store. Needs the extra ``server``.

`serve` runs it; `Config` and `Limits` are its settings.
"""

from knnstore.server.running import Config, serve
from knnstore.server.serving import Limits

__all__ = ["Config", "Limits", "serve"]

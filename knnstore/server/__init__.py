"""Server of OpenAI's HTTP protocol that predicts with a model and a store. Needs the extra ``server``.

`serve` runs the server; `Config` and `Limits` are its settings. `UpstreamAddress` names a vLLM server that
can do the generation, and `check_upstream` checks that vLLM server.
"""

from knnstore.server.running import Config, serve
from knnstore.server.serving import Limits
from knnstore.server.upstream import UpstreamAddress, check_upstream

__all__ = ["Config", "Limits", "UpstreamAddress", "check_upstream", "serve"]

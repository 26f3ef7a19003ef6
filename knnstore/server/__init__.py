"""Server of OpenAI's HTTP protocol over a store. Needs the extra ``server``.

`serve` runs it; `Config` and `Limits` are its settings. `UpstreamAddress` names a vLLM server behind it, and
`check_upstream` checks that server.
"""

from knnstore.server.running import Config, serve
from knnstore.server.serving import Limits
from knnstore.server.upstream import UpstreamAddress, check_upstream

__all__ = ["Config", "Limits", "UpstreamAddress", "check_upstream", "serve"]

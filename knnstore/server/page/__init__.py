"""The inspector: a web page of the server that shows the sources of each token of a text.

A source is a stored document whose records were retrieved for the token. The page consists of plain
JavaScript modules and loads nothing from other servers.
"""

from knnstore.server.page.files import declare_page

__all__ = ["declare_page"]

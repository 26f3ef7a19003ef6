"""The inspector: a web page that shows the sources of each token of a text.

It consists of plain JavaScript modules and loads nothing from other servers.
"""

from knnstore.server.page.files import declare_page

__all__ = ["declare_page"]

"""The inspector: a page that says what caused each token of a text. Plain modules, nothing from elsewhere."""

from knnstore.server.page.files import declare_page

__all__ = ["declare_page"]

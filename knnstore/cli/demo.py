"""The demonstration."""


def demo() -> None:
    """Show it.

    Examples:
      knnstore demo
    """

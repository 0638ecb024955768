"""Communication between the processes of a program: discovery, exchange of values, and barriers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

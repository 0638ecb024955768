"""The processes of a program: how they find each other, exchange values and wait for each other."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

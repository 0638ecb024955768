"""Plan, write, read and load the folder in which a pytree is stored."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

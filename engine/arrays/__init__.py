"""Plan, write and read the folder in which a pytree is stored, and load the pytree from it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

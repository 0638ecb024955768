"""Plan and write the folder that stores a pytree, and load the pytree from that folder."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

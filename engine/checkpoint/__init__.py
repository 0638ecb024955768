"""One checkpoint: the commit protocol, saves at once and in the background."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

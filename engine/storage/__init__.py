"""Storage of bytes: paths and URLs, small objects, bulk data files, locks, and work on threads."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""The storage layer: paths and URLs, small objects, bulk data files, file locks and threads."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

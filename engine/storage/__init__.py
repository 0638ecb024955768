"""The storage layer: locations, small objects, bulk data files, file locks and thread parallelism."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Storage, retention and resume for arrays and files, independent of any training loop."""

__version__ = "0.1.0"

"""Storage, retention and resume; knows arrays and files, never a training loop."""

VERSION = "0.1.0"  # of holdfast

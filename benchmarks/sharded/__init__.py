"""The contenders that save one tree from several processes, all behind ``ShardedPeer``."""

from __future__ import annotations

from importlib import import_module

from .base import ShardedPeer

SHARDED_PEERS = {
    "raw disk": "raw_programs:RawDisk",
    "raw disk, new memory": "raw_programs:RawDiskNewMemory",
    "holdfast (jax)": "jax_programs:HoldfastJax",
    "holdfast (torch)": "torch_programs:HoldfastTorch",
    "orbax": "jax_programs:Orbax",
    "torch dcp": "torch_programs:TorchDcp",
}


def load_sharded_peer(name: str) -> type[ShardedPeer]:
    """Import a contender's module and return its class."""
    module, class_name = SHARDED_PEERS[name].split(":")
    found: type[ShardedPeer] = getattr(import_module(f".{module}", __name__), class_name)
    return found

"""The contenders: one module for each library, all behind ``Peer``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from .base import Peer


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The facts about a contender that need no import of its library.

    Attributes:
        where: Its module in this folder and its class.
        loads: The operations that load.
        skipped: Workloads that say nothing about it.
    """

    where: str
    loads: tuple[str, ...] = ("load_numpy", "load_native")
    skipped: tuple[str, ...] = ()


PEERS = {
    "raw disk": Entry(where="raw_disk:RawDisk", loads=("load_numpy",)),
    "raw disk, new memory": Entry(where="raw_disk:RawDiskNewMemory", loads=("load_numpy",)),
    "holdfast (jax)": Entry(where="holdfast_engine:HoldfastJax"),
    "holdfast (torch)": Entry(where="holdfast_engine:HoldfastTorch"),
    "orbax": Entry(where="orbax_checkpoint:Orbax"),
    # one file for each array: not feasible for 10,000 of them
    "orbax (tuned)": Entry(where="orbax_checkpoint:OrbaxTuned", skipped=("leaves",)),
    "safetensors": Entry(where="safetensors_file:Safetensors"),
    "torch.save": Entry(where="torch_save:TorchSave"),
    "torch dcp": Entry(where="torch_dcp:TorchDcp"),
    "tensorstore": Entry(where="tensorstore_ocdbt:TensorStoreOcdbt", loads=("load_numpy",)),
}


def load_peer(name: str) -> Peer:
    """Import a contender's module and make the contender."""
    module, class_name = PEERS[name].where.split(":")
    peer = getattr(import_module(f".{module}", __name__), class_name)()
    assert isinstance(peer, Peer)
    return peer

"""swarm_kv: KV cache of long-context language models on several SSDs.

Importing it makes the attention name "swarm_kv" known to transformers and changes nothing else.
"""

from . import baselines, compat, errors, ops, selectors  # noqa: F401  (compat checks versions)
from .attention import register as _register
from .cache import SwarmCache
from .config import SwarmConfig
from .errors import ArgumentError, CapacityError, StateError, StorageError, SwarmError
from .meter import DriveStats, Stats
from .patch import Swarm, patch, unpatch
from .store import Store

_register()

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "CapacityError",
    "DriveStats",
    "StateError",
    "Stats",
    "StorageError",
    "Store",
    "Swarm",
    "SwarmCache",
    "SwarmConfig",
    "SwarmError",
    "baselines",
    "errors",
    "ops",
    "patch",
    "selectors",
    "unpatch",
]

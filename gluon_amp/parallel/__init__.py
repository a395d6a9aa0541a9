"""Distributed training: stores, all-reduce, consistency checks, the launcher."""
from .consistency import RanksDifferError, average_statistics
from .horovod import Horovod

__all__ = ["Horovod", "RanksDifferError", "average_statistics"]

"""Distributed training: stores, all-reduce, consistency checks, supervision."""
from .consistency import RanksDifferError, average_statistics
from .supervise import RankEndedError

__all__ = ["RankEndedError", "RanksDifferError", "average_statistics"]

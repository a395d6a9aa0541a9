"""Distributed training: stores, all-reduce, consistency checks, the launcher."""
from .consistency import RanksDifferError, average_statistics

__all__ = ["RanksDifferError", "average_statistics"]

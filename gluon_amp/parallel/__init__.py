"""Many workers that train one network: stores, sums, comparisons, supervision."""
from .consistency import RanksDifferError, average_statistics
from .supervise import RankEndedError

__all__ = ["RankEndedError", "RanksDifferError", "average_statistics"]

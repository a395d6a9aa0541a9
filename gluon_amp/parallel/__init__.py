"""Many workers that train one network: stores, sums, comparisons, supervision."""

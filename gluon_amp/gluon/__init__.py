"""Mixed precision for Gluon blocks."""

"""Mixed precision for symbols and `Module`."""

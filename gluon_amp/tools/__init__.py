"""Command-line tools: gluon-amp, its doctor, demo and X-ray."""

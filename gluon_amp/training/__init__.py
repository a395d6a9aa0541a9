"""A step: scaled backward passes, checks, optimizers, states."""

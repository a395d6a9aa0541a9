"""Training steps: scaled backward passes, overflow checks, optimizers, checkpoints."""

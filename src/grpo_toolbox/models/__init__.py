"""Where policies come from: two that need no hub, local folders, hub names; adapters, references, checkpoints."""

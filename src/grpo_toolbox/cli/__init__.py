"""The `toolbox` command: one file per command; nothing here imports torch before a command needs it."""

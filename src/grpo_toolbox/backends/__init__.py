"""The same config on other trainers."""

"""What runs inside a sandbox: the standard library and nothing else, so that it can be shown to any interpreter."""

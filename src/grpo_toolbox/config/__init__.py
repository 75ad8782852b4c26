"""From YAML and the command line to a run: `schema.py` says what can be set, `build.py` turns it into objects."""

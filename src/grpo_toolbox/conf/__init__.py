"""The Hydra config groups: one folder per group, one YAML file per option."""

"""Every key that can be set, and what to say of one that cannot."""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_toolbox.config.source import CONF, OPEN_GROUPS, SCHEMA_GROUPS, SHARED_KEYS, groups, schema_keys
from grpo_toolbox.errors import ConfigError, suggest

TOP_KEYS = tuple(name for name, _, _, _ in schema_keys("RunConfig"))
MANY = 12
"""A list of more names than this says less than the nearest one."""
OTHER_PARTS = {
    "reward.heldout": (
        "reward.heldout is one value: reward.heldout=my_module:my_fn, or with options "
        "'reward.heldout={name: exact_match, extract: boxed}'."
    ),
    "launcher": "launcher: there are no launchers in this version. Start `toolbox train` on the machine itself.",
}
"""Keys that people try here, of other tools among them."""
_POINTER = " `toolbox train --help` lists groups and keys."


def known_keys() -> list[str]:
    """Return every key that an override can name, in dotted form, of all options of all groups."""
    keys = [*TOP_KEYS, *groups()]
    for group, class_name in SCHEMA_GROUPS.items():
        keys += typed_keys(group, class_name)
    for group, class_name in SHARED_KEYS.items():
        keys += typed_keys(group, class_name)
    for group in OPEN_GROUPS:
        for path in (CONF / group).glob("*.yaml"):
            names = re.findall(r"^(\w+):", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            keys += [f"{group}.{name}" for name in names if name != "defaults"]
    return sorted(set(keys))


def typed_keys(prefix: str, class_name: str) -> dict[str, str]:
    """Return the dotted keys of a schema class and of those inside it, with their types."""
    keys: dict[str, str] = {}
    for name, kind, _, _ in schema_keys(class_name):
        keys |= typed_keys(f"{prefix}.{name}", kind) if kind.endswith("Config") else {f"{prefix}.{name}": kind}
    return keys


def unknown_key(key: str, siblings: Sequence[str]) -> ConfigError:
    """Build the error for a key that nothing reads; `siblings` are the keys that stand where it was set."""
    part, _, name = key.rpartition(".")
    for other, message in OTHER_PARTS.items():
        if key == other or key.startswith(f"{other}."):
            return ConfigError(message)
    if part.startswith("callbacks.") and part in known_keys() and not siblings:
        return ConfigError(f"{part} is switched off (null), so {name} has no place: write +{key}=… to switch it on.")
    near = suggest(name, [one for one in siblings if one != "name"])
    if near and part:
        near = near.replace("mean ", f"mean {part}.")
    elsewhere = [one for one in known_keys() if one.rpartition(".")[0] != part]
    same_name = [one for one in elsewhere if one.rpartition(".")[2] == name]
    if not near and same_name:
        near = f" Did you mean {same_name[0]}?"
    elif not near and not (part and siblings):  # the place itself is mistyped
        near = suggest(key, elsewhere)
    listed = f" {part} has: {', '.join(siblings)}." if part and siblings and (not near or len(siblings) <= MANY) else ""
    plug_in = f" (+{key}=… passes an option to a function of yours.)" if part in OPEN_GROUPS and not near else ""
    return ConfigError(f"{key} is not a setting.{near}{listed}{plug_in or _POINTER * (not near and not listed)}")

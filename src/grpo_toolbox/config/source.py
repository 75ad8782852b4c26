"""What the package offers, read off its own files: names, options, defaults, without waiting for torch."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
CONF = PACKAGE / "conf"
SCHEMA_GROUPS = {
    "model": "ModelConfig",
    "data": "DataConfig",
    "rollout": "RolloutConfig",
    "critic": "CriticConfig",
    "trainer": "TrainerConfig",
}
OPEN_GROUPS = ("reward", "advantage", "objective", "callbacks")
"""Groups whose keys depend on the option chosen."""
SHARED_KEYS = {"reward": "RewardConfig"}
"""Keys that every option of such a group has beside its own."""


def groups() -> list[str]:
    """Return the config groups, sorted."""
    return sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and not folder.name.startswith("_"))


HANDED_IN = ("mask", "components", "weights", "penalty", "values")
"""Keyword arguments that the loop hands to a function which names them; they are not options."""


def option_names(group: str) -> list[str]:
    """Return the options of a config group, sorted."""
    return sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))


def schema_keys(class_name: str) -> list[tuple[str, str, str, str]]:
    """Return (name, type, default, meaning) of each field of a class of `config/schema.py`."""
    return class_fields("config/schema.py", class_name)


def class_fields(file: str, class_name: str) -> list[tuple[str, str, str, str]]:
    """Return (name, type, default, meaning) of each field of a class; the meaning is the docstring under it.

    The default is written as YAML has it, "required" where a value must be given. A field whose key is a keyword of
    Python has an underscore behind it.
    """
    body = next(node.body for node in _tree(file).body if isinstance(node, ast.ClassDef) and node.name == class_name)
    found = []
    for field, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        meaning = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            meaning = " ".join(str(following.value.value).split())
        default = _as_yaml(field.value) if field.value else ""
        found.append((field.target.id.removesuffix("_"), ast.unparse(field.annotation), default, meaning))
    return found


def _as_yaml(default: ast.expr) -> str:
    if isinstance(default, ast.Call) and default.keywords:  # field(default_factory=…)
        made = default.keywords[0].value
        default = made.body if isinstance(made, ast.Lambda) else made
    text = ast.unparse(default)
    known = {"MISSING": "required", "None": "null", "True": "true", "False": "false", "list": "[]", "dict": "{}"}
    return known.get(text, text.strip("'"))


def registry(file: str, name: str) -> dict[str, str]:
    """Return the keys of the dict literal `name` of a file, with the source text of their values."""
    value = _assigned(file, name)
    if not isinstance(value, ast.Dict):
        raise LookupError(f"{name} of {file} is not a dict literal")
    pairs = zip(value.keys, value.values, strict=True)
    return {str(ast.literal_eval(key)): ast.unparse(entry) for key, entry in pairs if key is not None}


def keyword_options(file: str, function: str) -> dict[str, str]:
    """Return the keyword-only parameters of a function of a file with their types, the name of a Literal resolved."""
    found = next(node for node in _tree(file).body if isinstance(node, ast.FunctionDef) and node.name == function)
    return {one.arg: _type(file, one.annotation) for one in found.args.kwonlyargs if one.arg not in HANDED_IN}


def _type(file: str, annotation: ast.expr | None) -> str:
    text = ast.unparse(annotation) if annotation is not None else ""
    alias = _assigned(file, text)
    meaning = ast.unparse(alias) if alias is not None else ""
    return meaning if meaning.startswith("Literal[") else text


def _assigned(file: str, name: str) -> ast.expr | None:
    """Return what a module-level name is set to."""
    for node in _tree(file).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.value
    return None


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))

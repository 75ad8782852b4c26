"""What the pages say is so: commands run, examples hold, names, files, metrics and keys are the real ones.

`python tests/test_docs.py` writes the generated tables of docs/config.md anew.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from command_line import composed, toolbox
from grpo_toolbox.advantages import ADVANTAGES
from grpo_toolbox.config.source import CONF, PACKAGE, SHARED_KEYS, groups, option_names, schema_keys
from grpo_toolbox.objectives import OBJECTIVES
from grpo_toolbox.ops import AGGREGATIONS, KL
from grpo_toolbox.ratios import CORRECTIONS, RATIO_LEVELS

ROOT = Path(__file__).parents[1]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
HOW = "python tests/test_docs.py"

# ---- what stands in a page


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks in one of `languages`."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text(page), flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in fences if language in languages]


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)


def rows(page: str, header: str) -> list[str]:
    """The first cells of the tables whose first header cell is `header`."""
    tables = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text(page), flags=re.MULTILINE)
    return [line.split(" | ")[0].removeprefix("| ") for table in tables for line in table.splitlines()]


def names(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def own_files(page: str) -> dict[str, str]:
    """The files that a page has its reader write: blocks that begin with `# name`, and the data it shows a line of."""
    found = {}
    for body in blocks(page, "python", "yaml"):
        named = re.match(r"(?:# @package _global_\n)?# ([\w/]+\.(?:py|yaml))\n", body)
        if named:
            found[named[1]] = body
    for body in blocks(page, "json"):
        found["problems.jsonl"] = (json.dumps(json.loads(body)) + "\n") * 16
    return found


# ---- commands

SHORT = "a step instead of hundreds"
COMPOSE = "composed only: "
SKIP = "not run: "
HOW_TO_RUN = (
    (r"toolbox train .*--(help|cfg)", ""),
    (r"toolbox verify$", ""),
    (r"toolbox (train|verify) .*\bgrpo_smollm", COMPOSE + "its model is fetched first"),
    (
        r"toolbox train .*\bgrpo_qwen_gsm8k",
        COMPOSE + "needs the hub, or a GPU for long",
    ),
    (r"toolbox train callbacks=(tensorboard|trackio|wandb)", COMPOSE + "tests/test_callbacks_loggers.py runs them"),
    (r"toolbox train", SHORT),
    (r"toolbox compare-backends", SKIP + "tests/test_compare_backends.py trains with both"),
    (r"toolbox (traces|memory|models list|reward check)", ""),
    (r"toolbox models get", SKIP + "93 MB; a slow test fetches them"),
    (r"pip install", SKIP + "the tests run in what it makes"),
    (r"python benchmarks/", SKIP + "takes minutes; tests/test_speed_counts.py has their options read"),
    (r"tail ", SKIP + "no command of ours"),
    (r"python tests/test_docs.py", SKIP + "it would write what these tests check"),
    (r"make \w", "a target of the Makefile"),
)
"""Pattern of a command, first match, and what is done instead of running it as it stands."""


def commands(page: str) -> list[str]:
    lines = "".join(blocks(page, "bash")).splitlines()
    return [" ".join(map(shlex.quote, shlex.split(line, comments=True))) for line in lines if line.strip()]


def run(command: str) -> None:
    how = next((how for pattern, how in HOW_TO_RUN if re.match(pattern, command)), None)
    assert how is not None, f"{command}: say in HOW_TO_RUN what to do with it"
    words = shlex.split(command)
    if how.startswith(SKIP):
        return
    if words[0] == "make":
        makefile = text("Makefile")
        settings = [word.partition("=")[0] for word in words[2:]]
        assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE), command
        assert all(re.search(rf"^{name} \?=", makefile, flags=re.MULTILINE) for name in settings), command
        return
    if how == SHORT:
        words.append(f"trainer.max_steps={2 if any(word.startswith('resume=') for word in words) else 1}")
    elif how.startswith(COMPOSE):
        words += ["--cfg", "job"]
    result = toolbox(*words[1:])
    assert result.code == 0, f"{command}\n{result.err}"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_every_command_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, in one folder, beside the files that the page has its reader write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, body in own_files(page).items():
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)  # another test's file of that name
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")
    for command in commands(page):
        run(command)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_every_example_in_python_holds(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page run one after the other, as a reader would paste them; their asserts are the facts."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for body in blocks(page, "python"):
        exec(compile(body, page, "exec"), namespace)


# ---- names


@pytest.mark.parametrize("group", ["reward", "advantage", "objective"])
def test_the_axes_of_the_readme_list_every_option(group: str) -> None:
    assert sorted(names(rows("README.md", f"`{group}=`"))) == option_names(group)


@pytest.mark.parametrize(
    ("header", "registry"),
    [
        ("`advantage=`", ADVANTAGES),
        ("`objective.name=`", OBJECTIVES),
        ("`objective.ratio_level=`", RATIO_LEVELS),
        ("`objective.correction=`", CORRECTIONS),
        ("`objective.kl=`", KL),
        ("`objective.loss_agg=`", AGGREGATIONS),
        ("`objective=`", option_names("objective")),
        ("`method=`", option_names("method")),
    ],
)
def test_algorithms_md_has_a_row_for_everything_that_is_maths(header: str, registry: Iterable[str]) -> None:
    assert sorted(names(rows("docs/algorithms.md", header))) == sorted(registry)


def method_lines() -> list[str]:
    """The second cells of the methods in docs/algorithms.md: what to write behind `toolbox train`."""
    (table,) = re.findall(r"^\| method \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text("docs/algorithms.md"), flags=re.MULTILINE)
    return names([line.split(" | ")[1] for line in table.splitlines()])


@pytest.mark.parametrize("line", method_lines())
def test_the_command_line_of_every_method_composes(line: str) -> None:
    composed(*shlex.split(line))


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py")}
    functions = set(re.findall(r"^def (test_\w+)", "\n".join(sources.values()), flags=re.MULTILINE))
    for name in re.findall(r"\btest_\w+(?:\.py)?", text(page)):
        assert name in sources or name in functions, name


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_every_path_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
    for path in re.findall(r"`((?:src|tests|docs|examples|benchmarks|conf)/[\w./]+)`", text(page)):
        assert (ROOT / path).exists() or (PACKAGE / path).exists(), path


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- files, layers, metrics, keys


def tree() -> Iterator[str]:
    """The paths of the README's tree; those of folders end with a slash."""
    folders: list[str] = []
    (listing,) = (body for body in blocks("README.md", "text") if body.startswith("README.md"))
    for line in listing.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, meaning = line.strip().partition(" ")
        assert meaning.strip() or name.endswith("/"), f"{name}: say what it is"
        path = "".join(folders[:depth]) + name
        folders[depth:] = [name]
        yield path


def test_the_readme_s_tree_is_the_file_system_s() -> None:
    listed = list(tree())
    assert len(listed) == len(set(listed))
    assert [path for path in listed if not (ROOT / path).exists()] == []
    package = [path for path in PACKAGE.rglob("*.py") if path.read_text().count("\n") > 1 and CONF not in path.parents]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/images/*"), *ROOT.glob("examples/*.py")]
    there = {path.relative_to(ROOT).as_posix() for path in (*package, *pages)}
    empty = {f"src/grpo_toolbox/{folder}__init__.py" for folder in ("", "cli/", "config/", "models/")}
    assert there - set(listed) - empty == set(), "these have no line in the README's tree"
    assert {f"src/grpo_toolbox/conf/{group}/" for group in groups()} <= set(listed)


def test_imports_go_down_the_layers_of_design_md() -> None:
    (listing,) = (body for body in blocks("docs/design.md", "text") if body.startswith("1 "))
    level = {room: place for place, line in enumerate(listing.splitlines()) for room in line.split()[1:]}
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if here in ("__init__", "conf"):
            continue
        assert here in level, f"{here} stands on no layer of docs/design.md"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            other = module.partition(".")[2].partition(".")[0]
            if module.startswith("grpo_toolbox") and other not in ("", here):
                assert level[other] < level[here], f"{path.relative_to(PACKAGE)} imports {module}"


def test_the_readme_explains_every_metric_that_a_run_writes(tmp_path: Path) -> None:
    words = ("trainer.max_steps=2", "trainer.eval_every=1", "data.eval_size=4", "callbacks=none")
    assert toolbox("train", *words, f"run_dir={tmp_path / 'run'}").code == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    written = {name for line in lines for name in line}
    explained = {name.replace("<name>", "exact_match") for name in names(rows("README.md", "name"))}
    assert explained == written


def generated() -> dict[str, str]:
    """The tables of docs/config.md that are read off the schema and the YAML files, by the name of their marker."""
    options = ["| group | option | what it is |", "|---|---|---|"]
    for group in groups():
        for option in option_names(group):
            comment, _ = head(group, option)
            options.append(f"| `{group}=` | `{option}` | {_cell(comment)} |")
    keys = ["| key | default | meaning |", "|---|---|---|", *_key_rows("", "RunConfig")]
    return {"groups": "\n".join(options), "keys": "\n".join(keys)}


def head(group: str, option: str) -> tuple[str, bool]:
    """The first line of the comment at the head of an option's file, and whether the comment goes on."""
    lines = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    comment, following, *_ = [line for line in lines if "@package" not in line]
    assert comment.startswith("# ")
    return comment.removeprefix("# "), following.startswith("# ")


def test_the_first_line_of_every_option_stands_by_itself() -> None:
    """It is what the table of docs/config.md says of the option."""
    lines = [(group, option, *head(group, option)) for group in groups() for option in option_names(group)]
    assert [line for line in lines if line[3] and not line[2].endswith(".")] == []


def _key_rows(prefix: str, class_name: str) -> Iterator[str]:
    for name, kind, default, meaning in schema_keys(class_name):
        if kind.endswith("Config"):
            yield from _key_rows(f"{prefix}{name}.", kind)
        elif name in SHARED_KEYS:
            yield from _key_rows(f"{prefix}{name}.", SHARED_KEYS[name])
        elif not kind.startswith("dict"):
            yield f"| `{prefix}{name}` | {default} | {_cell(meaning)} |"


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "\\<")


def with_tables(page: str) -> str:
    for name, table in generated().items():
        marked = rf"(<!-- {name}: {HOW} -->\n).*?(<!-- end -->)"
        page = re.sub(marked, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page, flags=re.DOTALL)
    return page


def test_the_tables_of_config_md_are_those_of_the_schema() -> None:
    page = text("docs/config.md")
    assert all(f"<!-- {name}: {HOW} -->" in page for name in generated())
    assert page == with_tables(page), f"docs/config.md is out of date: run `{HOW}`"


if __name__ == "__main__":
    (ROOT / "docs" / "config.md").write_text(with_tables(text("docs/config.md")), encoding="utf-8")

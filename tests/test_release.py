"""A release is one version everywhere, its notes come from the CHANGELOG, and its workflows name
what exists. `make dist` builds and checks the files; .ci/run calls it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import dsv4
from tests.test_public_index import PYTHONS
from tools.release_notes import NotReady, notes

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")


def parsed(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def test_the_version_is_the_same_everywhere() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    first = re.search(r"^## (\S+), ", CHANGELOG, re.MULTILINE)
    assert first is not None
    versions = {dsv4.__version__, PROJECT["version"], citation["version"], first[1]}
    assert len(versions) == 1
    assert re.fullmatch(r"\d+\.\d+\.\d+", dsv4.__version__)


def test_metadata_names_what_an_index_shows() -> None:
    assert {"Source", "Documentation", "Changelog", "Issues"} <= set(PROJECT["urls"])
    assert PROJECT["authors"]
    found = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert tuple(found) == PYTHONS
    citation = parsed(ROOT / "CITATION.cff")
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    assert citation["license"] == PROJECT["license"]


def test_notes_are_the_section_of_the_changelog() -> None:
    version = PROJECT["version"]
    ready = re.sub(rf"^## {version}, .*$", f"## {version}, 2026-12-01", CHANGELOG, flags=re.M)
    text = notes(version, changelog=ready, package=version)
    assert text.count("### Added") == 1
    assert "\n## " not in text
    assert text in ready


@pytest.mark.parametrize(
    ("version", "changelog", "word"),
    [
        ("9.9.9", "## 9.9.9, 2026-12-01\n", "pyproject.toml 1.0.0"),
        ("1.0.0", "## 0.9.0, 2026-12-01\n", "no section"),
        ("1.0.0", "## 1.0.0, unreleased\n\n- all\n", "its day"),
    ],
)
def test_a_release_that_is_not_ready_says_why(version: str, changelog: str, word: str) -> None:
    with pytest.raises(NotReady, match=word):
        notes(version, changelog=changelog, package="1.0.0")


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda p: p.stem)
def test_workflows_call_what_exists_with_no_more_rights_than_they_need(path: Path) -> None:
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "uses" in job or "permissions" in job or job.get("timeout-minutes", 999) <= 60
        if own := job.get("uses", "").removeprefix("./"):
            assert (ROOT / own).exists()
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        command = step.get("run", "")
        for target in re.findall(r"\bmake (\w+)", command):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for file in re.findall(r"(?:\.ci|tools)/\w+(?:\.py)?", command):
            assert (ROOT / file).exists()


def test_ci_runs_every_python_that_is_allowed_and_only_the_public_index() -> None:
    test = parsed(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]
    assert tuple(test["strategy"]["matrix"]["python"]) == PYTHONS
    assert test["env"] == {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "https://pypi.org/simple",
    }


def test_only_one_job_of_a_release_may_publish_and_it_runs_nothing_of_ours() -> None:
    jobs = parsed(GITHUB / "workflows" / "release.yml")["jobs"]
    may = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert may == ["publish"]
    assert all("run" not in step for step in jobs["publish"]["steps"])
    assert jobs["publish"]["needs"] == "build"
    assert jobs["build"]["needs"] == "test"


@pytest.mark.parametrize("name", ["gpu_results", "bug"])
def test_forms_ask_with_fields_that_github_knows(name: str) -> None:
    form = parsed(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    for field in form["body"]:
        assert field["type"] in ("markdown", "input", "textarea", "dropdown")
        assert field["type"] == "markdown" or (field["id"] and field["attributes"]["label"])

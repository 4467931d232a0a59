"""Whatever of ours is installed has its name below `understudy`, and nothing is imported by another one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import proxied
import pytest
import torch
from places import ROOT

from understudy.recovery.base.own_modules import PACKAGE, module_command, name_of

FOLDERS = ("campaigns", "examples", "proxy_client", "proxy_server", "protos", "recovery", "replay")
NAME = f"(?:{'|'.join(FOLDERS)})"
FORMER = re.compile(
    rf"""(?:^|["';(]) \s* (?: from\ +{NAME}(?:\.[\w.]+)?\ +import\b | import\ +{NAME}\b )"""
    rf"""| -m["',\ ]+{NAME}\. | (?:setattr\(|modules\.get\(|modules\[|find_spec\()["']{NAME}\b""",
    re.VERBOSE | re.MULTILINE,
)
"""An import by a name of before, a module to be run, or one named in a string (for monkeypatch, say)."""
THE_SCRIPTS_OWN = {"tests/workloads/guest.py"}


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def former_names(text: str) -> list[str]:
    return [found[0].strip() for found in FORMER.finditer(text)]


@pytest.mark.parametrize(
    "line",
    [
        "from recovery.planner import plan", "import replay", "    from protos import control_pb2",
        "import recovery.facts as facts", 'code = "import sys; from replay import Log"',
        'run("-m", "recovery.proxyd")', "python -m proxy_server.spawner",
        'setattr("recovery.upkeep.floors.FLOOR", 0)', 'sys.modules["proxy_client"]',
    ],
)  # fmt: skip
def test_a_former_name_is_noticed(line: str) -> None:
    assert former_names(line)
    ours = re.sub(rf"\b({NAME})\b(?!/)", r"understudy.\1", line).replace("import understudy.replay", "")
    assert not former_names(ours), ours


def test_nothing_is_imported_or_run_by_a_former_name() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in tracked("*.py", "*.pyi", "*.md", "*.toml", "Makefile", "deploy", ".ci")
        if str(path.relative_to(ROOT)) not in THE_SCRIPTS_OWN and path.name != Path(__file__).name
        if (names := former_names(path.read_text(errors="replace")))
    }
    assert not found


def test_the_client_never_imports_the_package_above_it() -> None:
    """Which in a worker may be a module of the script's."""
    above = re.compile(rf"^\s*(?:import {PACKAGE}\b|from {PACKAGE} import)", re.MULTILINE)
    assert above.search(f"x\n    import {PACKAGE}.proxy_client.session")
    assert not [path for path in tracked("proxy_client/*.py") if above.search(path.read_text())]


def test_each_folder_of_ours_is_linked_below_understudy_and_installed_there() -> None:
    links = {path.name: path.readlink() for path in (ROOT / PACKAGE).iterdir() if path.is_symlink()}
    assert links == {name: Path("..") / name for name in FOLDERS}
    files = importlib.metadata.files("torch-understudy") or []
    tops = {path.parts[0] for path in files if path.parts[0] != ".."}
    assert {top for top in tops if not top.endswith(".dist-info")} == {PACKAGE}
    assert {path.parts[1] for path in files if path.parts[0] == PACKAGE} >= {*FOLDERS, "__init__.py"}


def test_installed_libraries_find_the_pytorch_beside_them() -> None:
    """What they would find where they were built hides a wrong path from all tests on that machine."""
    libraries = [
        Path(str(path.locate()))
        for path in importlib.metadata.files("torch-understudy") or []
        if path.suffix == ".so"
    ]
    assert len(libraries) >= 6
    for library in libraries:
        said = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        if library.name == "libunderstudy_cuda_watch.so":  # for LD_PRELOAD: it needs libc alone
            assert not re.findall(r"\(NEEDED\).*\[lib(?:torch|c10|stdc)", said)
            continue
        (places,) = re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", said)
        own = [place for place in places.split(":") if place.startswith("$ORIGIN/")]
        beside = [Path(place.replace("$ORIGIN", str(library.parent))).resolve() for place in own]
        assert beside == [Path(torch.__file__).resolve().parent / "lib"], library


def test_each_module_of_ours_that_is_run_as_a_process_is_there() -> None:
    run = re.compile(r"(?:module_command|name_of)\(\s*\"([\w.]+)\"")
    names = {name for path in tracked("recovery", "tests", "bench") if path.suffix == ".py"
             for name in run.findall(path.read_text())}  # fmt: skip
    assert {"recovery.proxyd", "proxy_server.spawner"} <= names
    for name in names:
        assert importlib.util.find_spec(name_of(name)), name


@pytest.mark.drawn(2)
def test_our_commands_and_packages_work_inside_a_job_as_outside(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys, torch\n"
        "x = torch.ones(3, device='cuda')\n"
        "import understudy.recovery.planning.planner, understudy.replay\n"
        "assert understudy.__file__ and understudy.__version__ != '0+checkout'\n"
        f"done = subprocess.run({[*module_command('recovery.recoveryctl'), 'drill', '--list']!r})\n"
        "print('sum', int(x.sum()), 'status', done.returncode)\n"
    )
    ended = proxied.run(proxied.python(script), folder=tmp_path)
    assert "kill-server" in ended.output and "sum 3 status 0" in ended.output, ended.output[-3000:]


@pytest.mark.drawn(2)
def test_nothing_of_ours_becomes_importable_in_a_python_that_has_it_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for entry in Path(torch.__file__).parent.parent.iterdir():
        if entry.name != PACKAGE and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    monkeypatch.setenv("PYTHONPATH", str(site))
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.util, sys, torch\n"
        f"names = {[PACKAGE, *FOLDERS]!r}\n"
        "print('found:', [name for name in names if name in sys.modules or importlib.util.find_spec(name)])\n"
        "print('sum', int(torch.ones(3, device='cuda').sum()))\n"
    )
    ended = proxied.run([sys._base_executable, str(script)], folder=tmp_path)  # type: ignore[attr-defined]
    assert "found: []" in ended.output and "sum 3" in ended.output, ended.output[-3000:]

"""Build a tool family from its Go module and keep only the result.

Each family gets a module of its own, because Kubernetes disagrees with the others about versions of
what they share. Go's caches grow to gigabytes, so they live in the build folder and are removed
after a success; after a failure they stay, and the next try goes on from there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import machine
from .errors import HarnessError, tail
from .locks import exclusive
from .places import Places
from .report import say
from .tools import MONITORING_CRDS, ToolFamily, family_of, imports_of, path_of

_REPLACED_BY_FOLDER = re.compile(r"^\s*(\S+) => \./staging/", re.MULTILINE)
_DISK_GIB = 12  # Go's caches at the end of the largest family, with some room


def tool(places: Places, name: str) -> Path:
    """Path of a tool's program or folder, built first if it is missing."""
    ensure(places, [family_of(name)])
    return path_of(places, name)


def ensure(places: Places, families: Iterable[ToolFamily]) -> None:
    """Build whatever is missing of these families; nothing is done when all is cached."""
    wanted = [family for family in families if family.missing(places)]
    if not wanted:
        return
    with exclusive(places, "tools"):
        for family in wanted:
            if family.missing(places):  # another process may have built it meanwhile
                machine.require_go()
                machine.require_disk(places.cache, _DISK_GIB, "to build Go programs")
                _build(places, family)
        _drop_go_caches(places)


def _build(places: Places, family: ToolFamily) -> None:
    started = time.monotonic()
    say(f"building {family.name} {family.version} ({', '.join(family.missing(places))})")
    folder = places.build / family.name
    folder.mkdir(parents=True, exist_ok=True)
    family.folder(places).mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    log.write_text("")
    (folder / "go.mod").write_text(_go_mod(places, family, log))
    (folder / "go.sum").unlink(missing_ok=True)
    if family.source:
        shutil.copytree(family.source, folder, dirs_exist_ok=True)
    if imports := imports_of(family):
        _go(places, family, log, ["get", *imports])
    if family.generates:
        _generate(places, family, log)
    else:
        for name, package in zip(family.programs, family.packages, strict=True):
            _compile(places, family, log, name, _path(family, package))
    if family.keeps:
        module = _download(places, family, log, family.module, family.module_version)
        for file in family.keeps:
            shutil.copyfile(module / file, family.folder(places) / Path(file).name)
    say(f"built {family.name} in {time.monotonic() - started:.0f} s")


def _path(family: ToolFamily, package: str) -> str:
    if family.source:
        return f"./{package}"
    return family.module if package == "." else f"{family.module}/{package}"


def _go_mod(places: Places, family: ToolFamily, log: Path) -> str:
    lines = ["module kubelora.dev/tools", "", "go 1.24.0"]
    if family.staging_version:
        module = _download(places, family, log, family.module, family.module_version)
        for name in _REPLACED_BY_FOLDER.findall((module / "go.mod").read_text()):
            lines.append(f"replace {name} => {name} {family.staging_version}")
    return "\n".join(lines) + "\n"


def _download(places: Places, family: ToolFamily, log: Path, module: str, version: str) -> Path:
    # Outside any module, so that a half-written go.mod cannot disturb it.
    arguments = ["mod", "download", "-json", f"{module}@{version}"]
    answer = _go(places, family, log, arguments, places.build)
    return Path(json.loads(answer)["Dir"])


def _compile(places: Places, family: ToolFamily, log: Path, name: str, package: str) -> None:
    final = family.folder(places) / name
    if final.exists():
        return
    aside = final.with_name(f".{name}.part")
    linker = " ".join(["-s", "-w", *(f"-X {variable}" for variable in family.variables)])
    options = [*_compiler_options(family), "-ldflags", linker]
    _go(places, family, log, ["build", *options, "-o", str(aside), package])
    aside.rename(final)  # an interrupted build never leaves something that looks finished


def _compiler_options(family: ToolFamily) -> list[str]:
    """Options of `go build`, alike for all families, or what they share is compiled again.

    Programs that run for some minutes are not worth the inliner, a fifth of the compiler's time;
    nobody debugs them with DWARF tables.
    """
    jobs = os.environ.get("KUBELORA_JOBS")
    limit = ["-p", jobs] if jobs else []
    tags = ["-tags", ",".join(family.tags)] if family.tags else []
    return [*limit, *tags, "-trimpath", "-gcflags=all=-l -dwarf=false"]


def _generate(places: Places, family: ToolFamily, log: Path) -> None:
    """Run controller-gen over the API module, from inside it: its packages resolve there alone."""
    generator = places.build / family.name / family.programs[0]
    package = _path(family, family.packages[0])
    _go(places, family, log, ["build", *_compiler_options(family), "-o", str(generator), package])
    source = _download(places, family, log, family.input_module, family.input_version)
    work = places.build / family.name / "source"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work)
    subprocess.run(["chmod", "-R", "u+w", str(work)], check=True)
    output = places.build / family.name / "output"
    command = [str(generator), "crd", "paths=./v1/...", f"output:crd:dir={output}"]
    _run(command, work, _environment(places, family), log, f"generating {family.name}")
    for name in family.generates:
        shutil.copyfile(output / name, family.folder(places) / name)


def _go(
    places: Places,
    family: ToolFamily,
    log: Path,
    arguments: Sequence[str],
    folder: Path | None = None,
) -> str:
    where = folder or places.build / family.name
    return _run(
        ["go", *arguments], where, _environment(places, family), log, f"building {family.name}"
    )


def _run(
    command: Sequence[str], folder: Path, environment: dict[str, str], log: Path, what: str
) -> str:
    with log.open("a") as stream:
        done = subprocess.run(
            list(command),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            check=False,
        )
        stream.write(done.stdout)
    if done.returncode != 0:
        raise HarnessError(
            f"`{' '.join(command[:4])} …` failed while {what}; the end of {log}:\n{tail(log)}"
        )
    return done.stdout


def _environment(places: Places, family: ToolFamily) -> dict[str, str]:
    flags = f"{os.environ.get('GOFLAGS', '')} -modcacherw -buildvcs=false".strip()
    return {
        **os.environ,
        "GOCACHE": str(places.build / "go-build"),
        "GOMODCACHE": str(places.build / "go-mod"),
        "GOFLAGS": flags,
        "GOWORK": "off",
        "CGO_ENABLED": "0",
    }


def _drop_go_caches(places: Places) -> None:
    """Keep the modules' go.mod, go.sum and logs; everything else can be made again."""
    for name in ("go-build", "go-mod"):
        shutil.rmtree(places.build / name, ignore_errors=True)
    shutil.rmtree(places.build / MONITORING_CRDS.name, ignore_errors=True)

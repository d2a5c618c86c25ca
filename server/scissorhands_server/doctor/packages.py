"""Python and the packages, against what our own package asks for."""

import platform
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from scissorhands_server.doctor.finding import Finding

_PACKAGE = "scissorhands"


def check_python() -> Finding:
    """Compare the interpreter with what our package asks for."""
    version = platform.python_version()
    try:
        wanted = metadata.metadata(_PACKAGE)["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        return _not_installed("python")
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding.ok("python", f"{version} ({wanted})")
    return Finding.failed("python", version, f"make the virtual environment with Python {wanted}")


def check_packages(extra: str) -> Finding:
    """Compare the installed packages with what one of our extras asks for; the empty one is the client."""
    check = f"packages {extra or 'client'}"
    try:
        # The extras that an extra names have been resolved when our package was built.
        requirements = [Requirement(text) for text in metadata.requires(_PACKAGE) or []]
    except metadata.PackageNotFoundError:
        return _not_installed(check)
    wanted = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]
    faults = [fault for each in wanted if (fault := _fault(each))]
    if not faults:
        return Finding.ok(check, f"{len(wanted)} as required")
    target = f"{_PACKAGE}[{extra}]" if extra else _PACKAGE
    return Finding.failed(check, "; ".join(faults), f"pip install '{target}'")


def _fault(requirement: Requirement) -> str:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} is {version}, not {requirement.specifier}"


def _not_installed(check: str) -> Finding:
    return Finding.failed(check, f"{_PACKAGE} is not installed", "pip install -e . in its source folder")

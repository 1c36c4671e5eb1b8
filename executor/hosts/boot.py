"""The first code on a host that is reached by ssh: finds the launcher's code there, or receives it, and runs it.

It is sent as text to `python -c`, so it imports nothing of ours before it has it, and any Python 3 reads it. Not here:
what the host is then asked (remote.py), or sending (ssh.py).
"""

import hashlib
import io
import json
import os
import shutil
import sys

OLDEST = (3, 11)
CODE = os.path.join("meshwright", "code")


def main():  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Read the launcher's first words, answer, and become `remote.main`."""
    stdin = sys.stdin.buffer
    asked = json.loads(stdin.readline() or b"{}")
    if not asked:
        return 1
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print is not a message
    me = {"python": sys.version.split()[0], "executable": sys.executable}

    def say(**words):  # type: ignore[no-untyped-def]  # noqa: ANN003, ANN202
        out.write(json.dumps(dict(me, **words)).encode() + b"\n")
        out.flush()

    out.write(b"\n" + asked["marker"].encode() + b"\n")
    if sys.version_info < OLDEST:
        say(kind="old")
        return 1
    place = os.path.join(cache(), asked["code"])
    have = digest(place) == asked["code"]
    say(kind="code", have=have)
    if not have:
        import zipfile  # here, since launchers read this file as a module too

        packed = stdin.read(json.loads(stdin.readline() or b'{"bytes": 0}')["bytes"])
        try:
            unpack(packed, place)
        except (OSError, zipfile.BadZipFile) as error:
            say(kind="failed", what="code", place=place, why=str(error))
            return 1
        if digest(place) != asked["code"]:
            say(kind="failed", what="code", place=place, why="other bytes arrived")
            return 1
    sys.path[0] = place  # in place of the folder that Python was started in
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
    try:
        from executor.hosts import remote
    except ImportError as error:
        say(kind="missing", module=error.name or str(error))
        return 1
    say(kind="ready", place=place)
    return remote.main(stdin, out, asked)


def cache():  # type: ignore[no-untyped-def]  # noqa: ANN201
    """The folder that keeps code between runs, one subfolder for each digest."""
    own = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(own, CODE)


def digest(place):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Of all files in a folder by name and content, but what Python itself writes there; None where there is none."""
    if not os.path.isdir(place):
        return None
    found = {}
    for folder, inside, names in os.walk(place):
        inside[:] = [one for one in inside if one != "__pycache__"]
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as stream:
                found[os.path.relpath(path, place).replace(os.sep, "/")] = hashlib.sha256(stream.read()).hexdigest()
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()[:16]


def unpack(packed, place):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Put the files of a zip into a folder, which appears whole or not at all."""
    import zipfile

    part = "{}.{}.part".format(place, os.getpid())  # noqa: UP032  # any Python 3 reads it
    try:
        zipfile.ZipFile(io.BytesIO(packed)).extractall(part)
        shutil.rmtree(place, ignore_errors=True)
        try:
            os.rename(part, place)
        except OSError:  # another host that has the same home was first
            if not os.path.isdir(place):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

"""Connections to hosts, where ssh is a shell script that says what a host would say: what is sent, what is passed on,
and why a connection is none.

Not here: ssh itself, and hosts (tests/cluster/test_contact.py, test_connections.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from executor.hosts import ssh, ssh_session
from executor.hosts.hosts import HostEntry
from executor.system.sources import sources
from planner.basics.errors import PlannerError

OPENING = r"""#!/bin/sh
while [ "$1" != -- ]; do shift; done
name=$2
IFS= read -r start; IFS= read -r size; head -c "$size" > /dev/null
IFS= read -r asked
marker=${asked#*'"marker":"'} marker=${marker%%'"'*}
say() { echo "{\"kind\": \"$1\", \"python\": \"3.9\", \"executable\": \"/py\"$2}"; }
ready() { echo "$marker"; say code ', "have": true'; say ready; }
"""
ANSWERS = """
while IFS= read -r line; do
    case $line in *'"ask"'*) number=${line#*'"number":'}; number=${number%%[,\\}]*}
        echo "{\\"kind\\": \\"answer\\", \\"number\\": $number, \\"value\\": {\\"name\\": \\"$name\\"}}" ;; esac
done
"""


@pytest.fixture
def ssh_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes ssh a script that opens as a host does, and goes on in these words."""
    (path := tmp_path / "ssh").touch(0o700)
    monkeypatch.setenv(ssh_session.PROGRAM, shlex.join(["sh", str(path)]))
    return lambda words: path.write_text(OPENING + words + "\n") and None


def test_hosts_that_are_ready_answer_each_its_own_question_and_what_they_say_beside_is_passed_on(
    ssh_is: Callable[[str], None],
) -> None:
    ssh_is('echo "welcome to $name"; echo motd >&2; ready' + ANSWERS)
    machines, told = (HostEntry("red"), HostEntry("blue")), list[str]()
    with ssh.contact(machines, told.append) as contact:
        assert contact.refused == {}
        found = {one.place: one for one in contact.ask({"kind": "look"})}
        (only,) = contact.ask({1: {"kind": "look"}})

    assert {place: (one.machine, one.value, one.error) for place, one in found.items()} == {
        place: (machine, {"name": machine.name}, None) for place, machine in enumerate(machines)
    }
    assert (only.place, only.value) == (1, {"name": "blue"})
    assert {f"{name}  welcome to {name}" for name in ("red", "blue")} <= set(told)


def test_a_host_without_the_code_is_sent_it_once(ssh_is: Callable[[str], None], tmp_path: Path) -> None:
    ssh_is(
        f"""cd {tmp_path}; echo "$marker"; echo "$asked" > asked; say code ', "have": false'
        IFS= read -r code; size=${{code#*'"bytes":'}}; head -c ${{size%%[,\\}}]*}} > code; say ready
        {ANSWERS}"""
    )

    with ssh.contact((HostEntry("red"),), lambda _: None, "id") as contact:
        (one,) = contact.ask({"kind": "look"})

    assert one.value == {"name": "red"}
    assert (tmp_path / "code").read_bytes() == sources().packed
    assert f'"code":"{sources().digest}","contact":"id"' in (tmp_path / "asked").read_text()


NO = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "has another host key than ssh knows",
    "Could not resolve hostname": "does not resolve",
    "hostname contains invalid characters": "is not a name for ssh",
    "Host key verification failed.": "has a host key that ssh does not know",
    "me@red: Permission denied (publickey).": "refuses the key",
    "connect: Connection refused": "refuses connections: no sshd listens there",
    "connect: Connection timed out": "does not answer: it is down, or a firewall is between",
    "Connection closed by 10.0.0.1": "closed the connection",
    "something else": "cannot be reached: something else",
}
ENDS = {f"echo {shlex.quote(said)} >&2; exit 255": rule for said, rule in NO.items()} | {
    "exit 255": "cannot be reached: no output",
    "exit 96": "could not run its prelude: no output",
    "echo no such file >&2; exit 127": "starts no Python: no such file",
    "echo not allowed >&2; exit 126": "starts no Python: not allowed",
    "echo first >&2; echo last >&2; exit 1": "ended before Python answered (exit code 1): last",
    "echo $marker; say old; sleep 9": "has Python 3.9 at /py, which is too old: 3.11 is the oldest",
    'echo $marker; say missing \', "module": "yaml"\'': "has no package yaml for Python 3.9 at /py",
    'echo $marker; say failed \', "place": "/c", "why": "full"\'': "cannot keep the code in /c (full)",
    "echo $marker; echo no message": "sent an invalid answer (no message:",
}


def test_a_host_that_cannot_be_asked_is_refused_by_name_with_the_reason(
    ssh_is: Callable[[str], None],
) -> None:
    cases = "\n".join(f"n{place}) {words.replace('sleep 9', ':')} ;;" for place, words in enumerate(ENDS))
    ssh_is(f"case $name in\n{cases}\nesac")
    machines = tuple(HostEntry(f"n{place}", line=place + 1) for place in range(len(ENDS)))

    with ssh.contact(machines, lambda _: None) as contact:
        refused = contact.refused
        answers = {one.place: one for one in contact.ask({"kind": "look"})}

    rules = list(ENDS.values())
    assert [error.rule for place, error in refused.items() if not error.rule.startswith(rules[place])] == []
    assert list(refused) == list(range(len(ENDS))) == sorted(answers)
    for place, error in refused.items():
        assert (error.field, error.value, error.exit_code) == (f"line {place + 1}", f"n{place}", 3)
        assert error.fix and "{name}" not in error.fix and answers[place].error == error


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("ready; echo the end >&2; exit 3", "ended unexpectedly (exit code 3): "),
        ("ready; exit 95", "lost contact with its launcher for 15 s, and ended its processes"),
        ("ready; exit 255", "cannot be reached: no output"),
    ],
)
def test_a_host_that_is_lost_later_is_an_answer_and_a_message(
    ssh_is: Callable[[str], None], words: str, rule: str
) -> None:
    ssh_is(words.replace("ready;", "ready; IFS= read -r line;"))
    told: list[str] = []
    with ssh.contact((HostEntry("red"),), told.append) as contact:
        assert contact.refused == {}
        (one,) = contact.ask({"kind": "look"})
        assert one.error is not None and one.error.rule.startswith(rule)
        assert "the end" not in words or "red  the end" in told or one.error.rule == f"{rule}the end"
        (again,) = contact.ask({"kind": "look"}, timeout_s=5.0)
        assert again.error == one.error
        assert contact.refused == {0: one.error}


def test_a_host_that_does_not_answer_in_time_is_named(ssh_is: Callable[[str], None]) -> None:
    ssh_is("ready; while IFS= read -r line; do :; done")
    with ssh.contact((HostEntry("red"),), lambda _: None) as contact:
        (one,) = contact.ask({"kind": "look"}, timeout_s=0.05)
    assert one.error is not None and one.error.rule == "has not answered within 0.05 s" and one.error.exit_code == 3


def test_an_ssh_that_cannot_be_started_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ssh_session.PROGRAM, "/nowhere/ssh")
    with pytest.raises(PlannerError, match="cannot be started") as refused, ssh.contact((HostEntry("red"),), print):
        pass
    assert refused.value.exit_code == 3

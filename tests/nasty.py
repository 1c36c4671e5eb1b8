"""Sixty texts that some reader takes for something else than text. Each that can do anything makes a file `canary`.

Not here: what is asked of them (tests/planner/test_names.py, tests/executor/test_nasty.py).
"""

from __future__ import annotations

RUN = "touch canary"
TEXTS: tuple[str, ...] = (
    # Lines.
    f"m\n{RUN}\n#", f"m\r{RUN}\r#", f"m\r\n{RUN}\r\n", f"\n{RUN}", f"m\x0b{RUN}", f"m\x0c{RUN}", f"m\x85{RUN}",
    f"m\u2028{RUN}\u2029", f"#\n{RUN}", f"\\\n{RUN}",
    # A shell.
    f"$({RUN})", f"`{RUN}`", f"'; {RUN}; '", f'"; {RUN}; "', f"; {RUN}", f"| {RUN}", f"& {RUN} &", f"&& {RUN}",
    f"|| {RUN}", f"m) {RUN} (", f"$'\\n{RUN}'", "${IFS}", f"$(({RUN}))", f"<({RUN})",
    "> canary", "< /dev/null > canary",
    f"!{RUN}", "~", "*", "?", "[a-z]", "{touch,canary}", "$HOME", "'", '"', "\\", "a'b\"c\\d", f"\\$({RUN})",
    # Options.
    f"-oProxyCommand={RUN}", "--help", "-", "--", "-rf", f"--wrap={RUN}",
    # Terminals.
    "\x1b[2J\x1b[31mred", "\x1b]0;title\x07", "\x9b2J", "\x7f\x08", "\x00", "\u202egpj.exe", "\u2066a\u2069", "\ufeffm",
    # YAML, XML, TOML, formats of strings.
    f"a: !!python/object/apply:os.system ['{RUN}']", "&a *a", "<b>&amp;]]></b>", "{0.__class__}%s%n", "%j.%%",
    # Sizes and scripts.
    "x" * 10_000, " ", "模型 नमूना מודל",
)  # fmt: skip
